//! The CUDA form of group norm, alone or followed by SiLU. It launches the kernels of `cuda/kernels/group_norm.cu`.

use candle_core::DType;
use smallvec::smallvec;
use trainable_candle_cuda::kernels::group_norm::{
    GROUP_NORM_BACKWARD, GROUP_NORM_FORWARD, GROUP_NORM_MOMENTS, GROUP_NORM_SILU_BACKWARD, GROUP_NORM_SILU_FORWARD,
    GROUP_NORM_SILU_SUMS, GROUP_NORM_SLOPES, GROUP_NORM_STATISTICS, GROUP_NORM_SUMS,
    GroupNormBackward as BackwardArguments, GroupNormForward, GroupNormMoments, GroupNormSlopes, GroupNormStatistics,
    GroupNormSums,
};

use super::{Affine, GroupNormBackward, Size};
use crate::cuda::launch::{
    Shape, accumulator, count32, empty, input, optional_input, optional_output, output, suffix, wide,
};
use crate::cuda::{Gpu, filled};
use crate::ops::norm::cuda::{Gradients, Parameters, Wanted, destination, sum_affine};
use crate::tape::{Aux, BackwardContext};
use crate::{Raw, Result};

/// How the kernels split the work. `cuda/include/channels.cuh` has the same formulas.
struct Split {
    /// Number of ranges of channels. A thread block works on one of them.
    tiles: usize,
    /// Number of ranges of a sample's positions. A thread block works on one of them.
    pieces: usize,
    /// Launch shape of the kernels over the tensor's elements.
    over_tensor: Shape,
    /// Launch shape of the kernels with a thread block, of 128 threads, for each group of each sample.
    over_groups: Shape,
}

impl Size {
    fn split(&self, dtype: DType) -> Split {
        /// The maximum number of threads of a block.
        const THREADS: usize = 320;
        /// The samples are split into pieces only as long as the number of blocks does not exceed this number.
        const BLOCKS: usize = 256;
        // A pack is as many adjacent channels as a thread reads at once: `wide(dtype)`, 16 bytes.
        let packs = self.channels.div_ceil(wide(dtype)).max(1);
        let tiles = packs.div_ceil(THREADS);
        // A block has `lines` lines of `columns` threads. A thread of a line has one pack of channels, and every
        // `lines`-th position of the block's piece: about 8 positions, or more if `BLOCKS` limits the pieces.
        let columns = packs.div_ceil(tiles);
        let lines = (THREADS / columns).max(1);
        let most_pieces = (BLOCKS / (self.batch * tiles).max(1)).max(1);
        let pieces = self.positions.div_ceil(8 * lines).clamp(1, most_pieces);
        let threads = 32 * (columns * lines).div_ceil(32) as u32;
        let over_tensor =
            Shape { grid: [(self.batch * pieces) as u32, tiles as u32, 1], block: [threads, 1, 1], shared: 0 };
        let groups = (self.batch * self.groups) as u32;
        let over_groups = Shape { grid: [groups, 1, 1], block: [128, 1, 1], shared: 0 };
        Split { tiles, pieces, over_tensor, over_groups }
    }

    /// An uninitialised tensor for two numbers of each group in each tile and piece: in the forward pass the mean and
    /// the sum of squared deviations, in the backward pass two sums.
    fn partials(&self, op: &'static str, gpu: &Gpu, split: &Split, dtype: DType) -> Result<Raw> {
        empty(op, gpu, &[self.batch, split.tiles, self.groups, split.pieces, 2], accumulator(dtype))
    }
}

/// Returns the norm of a dense tensor `x (batch, ..., channels)`, followed by SiLU if `silu`; and, of each group,
/// 1/√(var + eps) and the mean, in this order.
pub(super) fn forward(
    op: &'static str,
    silu: bool,
    x: &Raw,
    size: Size,
    affine: &Affine<'_>,
    eps: f64,
) -> Result<(Raw, Aux)> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, affine.parameters())?;
    let y = empty(op, gpu, x.dims(), dtype)?;
    let statistic = || empty(op, gpu, &[size.batch, size.groups], accumulator(dtype));
    let (mean, rstd) = (statistic()?, statistic()?);
    if y.elem_count() == 0 {
        return Ok((y, smallvec![rstd, mean]));
    }
    let split = size.split(dtype);
    let partials = size.partials(op, gpu, &split, dtype)?;
    let suffix = suffix(op, dtype)?;
    let (x, partials_address) = (input(op, x)?, output(op, &partials)?);
    let [positions, channels, groups] =
        [count32(op, size.positions)?, count32(op, size.channels)?, count32(op, size.groups)?];
    let (pieces, tiles) = (split.pieces as u32, split.tiles as u32);
    let statistics = GroupNormStatistics { x, partials: partials_address, positions, channels, groups, pieces };
    let moments = GroupNormMoments {
        partials: partials_address,
        mean: output(op, &mean)?,
        rstd: output(op, &rstd)?,
        positions,
        channels,
        groups,
        pieces,
        tiles,
        eps,
    };
    let forward = GroupNormForward {
        x,
        weight: optional_input(op, parameters.weight.as_ref())?,
        bias: optional_input(op, parameters.bias.as_ref())?,
        mean: input(op, &mean)?,
        rstd: input(op, &rstd)?,
        y: output(op, &y)?,
        positions,
        channels,
        groups,
        pieces,
        affine_f32: parameters.is_f32(),
    };
    let kernel = if silu { &GROUP_NORM_SILU_FORWARD } else { &GROUP_NORM_FORWARD };
    // SAFETY: the tensors are dense and have the sizes in the arguments; `partials` has the sizes of `split`.
    unsafe {
        gpu.function(&GROUP_NORM_STATISTICS, suffix)?.launch(op, gpu, split.over_tensor, statistics)?;
        gpu.function(&GROUP_NORM_MOMENTS, suffix)?.launch(op, gpu, split.over_groups, moments)?;
        gpu.function(kernel, suffix)?.launch(op, gpu, split.over_tensor, forward)?;
    }
    Ok((y, smallvec![rstd, mean]))
}

/// Adds those gradients of `x`, scale (`weight`) and shift (`bias`) that are needed. `operands` are `x`, the gradient
/// of the result, and the mean and 1/√(var + eps) of each group; all are dense.
pub(super) fn backward<const SILU: bool>(
    norm: &GroupNormBackward<SILU>,
    context: &mut BackwardContext<'_>,
    operands: [&Raw; 4],
) -> Result<()> {
    let parameters = norm.affine.parameters()?;
    // `before` is the gradient that `x`, input 0, already has: the kernel adds the new one to it.
    let wanted = Wanted { before: context.take_pending(0, operands[0].dtype()), ..norm.affine.wanted(context) };
    let grads = gradients(norm, operands, parameters.each_ref().map(Option::as_ref), &wanted)?;
    norm.affine.add_gradients(context, grads)
}

/// Computes the gradients that `wanted` names. The other arguments are as in [`backward`]; `parameters` is weight and
/// bias.
fn gradients<const SILU: bool>(
    &GroupNormBackward { op, size, .. }: &GroupNormBackward<SILU>,
    [x, grad, mean, rstd]: [&Raw; 4],
    parameters: [Option<&Raw>; 2],
    wanted: &Wanted,
) -> Result<Gradients> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, parameters)?;
    let wants_affine = wanted.weight || wanted.bias;
    let dx = wanted.input.then(|| destination(op, gpu, x, wanted.before.as_ref())).transpose()?;
    let split = size.split(dtype);
    // All samples share scale and shift, so the pieces of all samples are summed as if they were those of one sample
    // (the 1 below). For each piece and channel there are two sums: for the gradients of scale and of shift.
    let all_pieces = size.batch * split.pieces;
    let affine_partials =
        wants_affine.then(|| empty(op, gpu, &[1, all_pieces, 2, size.channels], accumulator(dtype))).transpose()?;
    if x.elem_count() == 0 {
        let zeros =
            |wanted: bool| wanted.then(|| filled(x.device(), 0.0, &[size.channels], accumulator(dtype))).transpose();
        return Ok(Gradients { input: dx, weight: zeros(wanted.weight)?, bias: zeros(wanted.bias)? });
    }
    let partials = size.partials(op, gpu, &split, dtype)?;
    // Two numbers of each group, computed from `partials`, with which the last kernel computes the gradient of `x`.
    let slopes = empty(op, gpu, &[size.batch, size.groups, 2], accumulator(dtype))?;
    let suffix = suffix(op, dtype)?;
    let (sums, backward) = if SILU {
        (&GROUP_NORM_SILU_SUMS, &GROUP_NORM_SILU_BACKWARD)
    } else {
        (&GROUP_NORM_SUMS, &GROUP_NORM_BACKWARD)
    };
    let (x, grad) = (input(op, x)?, input(op, grad)?);
    let (mean, rstd) = (input(op, mean)?, input(op, rstd)?);
    let (weight, bias) =
        (optional_input(op, parameters.weight.as_ref())?, optional_input(op, parameters.bias.as_ref())?);
    let [positions, channels, groups] =
        [count32(op, size.positions)?, count32(op, size.channels)?, count32(op, size.groups)?];
    let (pieces, tiles, affine_f32) = (split.pieces as u32, split.tiles as u32, parameters.is_f32());
    let partials = output(op, &partials)?;
    let arguments = GroupNormSums {
        x,
        grad,
        weight,
        bias,
        mean,
        rstd,
        partials,
        affine_partials: optional_output(op, affine_partials.as_ref())?,
        positions,
        channels,
        groups,
        pieces,
        affine_f32,
    };
    // SAFETY: the tensors are dense and have the sizes in the arguments; `partials` and `affine_partials` have the
    // sizes of `split`.
    unsafe { gpu.function(sums, suffix)?.launch(op, gpu, split.over_tensor, arguments) }?;
    if let Some(dx) = &dx {
        let slopes_arguments = GroupNormSlopes {
            partials,
            rstd,
            slopes: output(op, &slopes)?,
            positions,
            channels,
            groups,
            pieces,
            tiles,
        };
        let arguments = BackwardArguments {
            x,
            grad,
            before: optional_input(op, wanted.before.as_ref().map(|pending| &pending.sum))?,
            weight,
            bias,
            mean,
            rstd,
            slopes: input(op, &slopes)?,
            dx: output(op, dx)?,
            positions,
            channels,
            groups,
            pieces,
            affine_f32,
        };
        // SAFETY: as above.
        unsafe {
            gpu.function(&GROUP_NORM_SLOPES, suffix)?.launch(op, gpu, split.over_groups, slopes_arguments)?;
            gpu.function(backward, suffix)?.launch(op, gpu, split.over_tensor, arguments)?;
        }
    }
    let [weight, bias] = match &affine_partials {
        Some(partials) => sum_affine(op, gpu, partials, dtype, [wanted.weight, wanted.bias])?,
        None => [None, None],
    };
    Ok(Gradients { input: dx, weight, bias })
}
