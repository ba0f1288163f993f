//! Layer, RMS and group norm.

use candle_core::DType;
use trainable_candle_cuda::kernels::group_norm::{
    GROUP_NORM_BACKWARD, GROUP_NORM_FORWARD, GROUP_NORM_MOMENTS, GROUP_NORM_SILU_BACKWARD, GROUP_NORM_SILU_FORWARD,
    GROUP_NORM_SILU_SUMS, GROUP_NORM_SLOPES, GROUP_NORM_STATISTICS, GROUP_NORM_SUMS, GroupNormBackward,
    GroupNormForward, GroupNormMoments, GroupNormSlopes, GroupNormStatistics, GroupNormSums,
};
use trainable_candle_cuda::kernels::norm::{
    LAYER_NORM_AFFINE, LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD, LayerNormAffine, LayerNormBackward, LayerNormForward,
    MODULATED_LAYER_NORM_BACKWARD, MODULATED_LAYER_NORM_FORWARD, NORM_AFFINE_SUM, NormAffineSum, RMS_NORM_AFFINE,
    RMS_NORM_BACKWARD, RMS_NORM_FORWARD,
};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::launch::{Shape, accumulator, count32, empty, input, optional_input, optional_output, output, suffix, wide};
use crate::tape::backward::Pending;
use crate::{Error, Raw, Result};

/// Scale and shift as kernels take them: both in the input's dtype, or both in f32.
struct Parameters {
    weight: Option<Raw>,
    bias: Option<Raw>,
    dtype: DType,
}

impl Parameters {
    fn new(input: DType, [weight, bias]: [Option<&Raw>; 2]) -> Result<Self> {
        let mixed = [weight, bias].into_iter().flatten().any(|parameter| parameter.dtype() != input);
        let dtype = if mixed { DType::F32 } else { input };
        let dense = |parameter: &Raw| contiguous(&cast(parameter, dtype)?);
        Ok(Self { weight: weight.map(dense).transpose()?, bias: bias.map(dense).transpose()?, dtype })
    }

    fn is_f32(&self) -> u32 {
        u32::from(self.dtype == DType::F32)
    }
}

/// The gradients of a norm that are wanted: of the input, of the scale and of the shift.
pub struct Gradients {
    pub input: Option<Raw>,
    pub weight: Option<Raw>,
    pub bias: Option<Raw>,
}

/// A norm of rows, as `kernels/norm.cu` has them.
#[derive(Clone, Copy)]
pub enum Kind {
    Layer,
    Rms,
    /// Layer norm with a scale, which is added to 1, and a shift for each sample of so many rows.
    Modulated {
        samples: usize,
        rows: usize,
    },
}

impl Kind {
    const fn centers(self) -> bool {
        !matches!(self, Self::Rms)
    }

    /// How many rows share a scale and a shift; kernels of the other kinds do not ask.
    fn sharing(self, op: &'static str) -> Result<u32> {
        if let Self::Modulated { rows, .. } = self { count32(op, rows) } else { Ok(1) }
    }

    /// How many pairs of scale and shift there are, and for how many of so many rows each.
    fn samples(self, op: &'static str, rows: usize) -> Result<[usize; 2]> {
        /// Blocks in the third dimension of a grid.
        const MOST: usize = 65_535;
        match self {
            Self::Modulated { samples, .. } if samples > MOST => {
                let message =
                    format!("a batch of {samples} is more than a GPU takes at once, expected up to {MOST}; split it");
                Err(Error::argument(op, message))
            }
            Self::Modulated { samples, rows } => Ok([samples, rows]),
            _ => Ok([1, rows]),
        }
    }
}

/// The launch of `kernels/norm.cu` over rows.
fn over_rows(rows: usize, len: usize, dtype: DType) -> Shape {
    const HELD: usize = 3;
    const THREADS: usize = 1 << 17;
    let shape = |held| Shape::teams(rows, len, held, dtype);
    let fits = |held: &usize| rows.saturating_mul(shape(*held).block[0] as usize) <= THREADS;
    shape((1..=HELD).find(fits).unwrap_or(HELD))
}

/// Where the gradient of an input goes: onto the one that it is added to, if that is only ours, else to a new tensor.
fn destination(op: &'static str, gpu: &Gpu, x: &Raw, before: Option<&Pending>) -> Result<Raw> {
    match before {
        Some(Pending { sum, owned: true }) => Ok(sum.clone()),
        _ => empty(op, gpu, x.dims(), x.dtype()),
    }
}

/// Rows that were normalised.
pub struct Rows {
    /// What they were before: the input, or its sum with another tensor.
    pub x: Raw,
    pub y: Raw,
    /// 1/√(var + eps) of each.
    pub rstd: Raw,
    /// The mean of each, if the norm takes it off.
    pub mean: Option<Raw>,
}

/// The normalised rows of a dense (rows, len), or of its sum with another.
pub fn rows(
    op: &'static str,
    kind: Kind,
    x: &Raw,
    residual: Option<&Raw>,
    [rows, len]: [usize; 2],
    parameters: [Option<&Raw>; 2],
    eps: f64,
) -> Result<Rows> {
    let gpu = Gpu::of(op, x)?;
    // What the backward pass could not do.
    kind.samples(op, rows)?;
    let parameters = Parameters::new(x.dtype(), parameters)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    let rstd = empty(op, gpu, &[rows], accumulator(x.dtype()))?;
    let mean = kind.centers().then(|| empty(op, gpu, &[rows], accumulator(x.dtype()))).transpose()?;
    let sum = residual.map(|_| empty(op, gpu, x.dims(), x.dtype())).transpose()?;
    if y.elem_count() > 0 {
        let kernel = match kind {
            Kind::Layer => &LAYER_NORM_FORWARD,
            Kind::Rms => &RMS_NORM_FORWARD,
            Kind::Modulated { .. } => &MODULATED_LAYER_NORM_FORWARD,
        };
        let function = gpu.function(kernel, suffix(op, x.dtype())?)?;
        let shape = over_rows(rows, len, x.dtype());
        let arguments = LayerNormForward {
            x: input(op, x)?,
            residual: optional_input(op, residual)?,
            sum: optional_output(op, sum.as_ref())?,
            weight: optional_input(op, parameters.weight.as_ref())?,
            bias: optional_input(op, parameters.bias.as_ref())?,
            y: output(op, &y)?,
            mean: optional_output(op, mean.as_ref())?,
            rstd: output(op, &rstd)?,
            rows: rows as u64,
            len: count32(op, len)?,
            sharing: kind.sharing(op)?,
            eps,
            affine_f32: parameters.is_f32(),
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(Rows { x: sum.unwrap_or_else(|| x.clone()), y, rstd, mean })
}

/// What the gradients of a norm are made from.
pub struct Saved<'a> {
    pub x: &'a Raw,
    pub grad: &'a Raw,
    /// If the norm takes it off.
    pub mean: Option<&'a Raw>,
    pub rstd: &'a Raw,
    pub weight: Option<&'a Raw>,
    pub bias: Option<&'a Raw>,
}

/// The gradients of [`rows`]; `wants` are those of input, scale and shift. That of the input is added to the dense gradient `before`.
pub fn rows_backward(
    op: &'static str,
    kind: Kind,
    saved: &Saved<'_>,
    [rows, len]: [usize; 2],
    wants: [bool; 3],
    before: Option<Pending>,
) -> Result<Gradients> {
    let Saved { x, grad, .. } = *saved;
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, [saved.weight, None])?;
    let (from, g, rstd, mean) =
        (input(op, x)?, input(op, grad)?, input(op, saved.rstd)?, optional_input(op, saved.mean)?);
    let len32 = count32(op, len)?;
    let mut of_input = None;
    if wants[0] {
        let dx = destination(op, gpu, x, before.as_ref())?;
        if dx.elem_count() > 0 {
            let kernel = match kind {
                Kind::Layer => &LAYER_NORM_BACKWARD,
                Kind::Rms => &RMS_NORM_BACKWARD,
                Kind::Modulated { .. } => &MODULATED_LAYER_NORM_BACKWARD,
            };
            let function = gpu.function(kernel, suffix(op, dtype)?)?;
            let arguments = LayerNormBackward {
                x: from,
                grad: g,
                before: optional_input(op, before.as_ref().map(|pending| &pending.sum))?,
                weight: optional_input(op, parameters.weight.as_ref())?,
                mean,
                rstd,
                dx: output(op, &dx)?,
                rows: rows as u64,
                len: len32,
                sharing: kind.sharing(op)?,
                affine_f32: parameters.is_f32(),
            };
            // SAFETY: the tensors are dense and of these sizes.
            unsafe { function.launch(op, gpu, over_rows(rows, len, dtype), arguments) }?;
        }
        of_input = Some(dx);
    }
    if !(wants[1] || wants[2]) {
        return Ok(Gradients { input: of_input, weight: None, bias: None });
    }
    let [samples, rows] = kind.samples(op, rows)?;
    let pieces = rows.div_ceil(64).clamp(1, 128);
    let partials = empty(op, gpu, &[samples, pieces, 2, len], accumulator(dtype))?;
    if partials.elem_count() > 0 {
        let kernel = if kind.centers() { &LAYER_NORM_AFFINE } else { &RMS_NORM_AFFINE };
        let function = gpu.function(kernel, suffix(op, dtype)?)?;
        let columns = len.div_ceil(32 * wide(dtype)) as u32;
        let shape = Shape { grid: [columns, pieces as u32, samples as u32], block: [32, 8, 1], shared: 0 };
        let (partials, rows) = (output(op, &partials)?, rows as u64);
        let arguments = LayerNormAffine { x: from, grad: g, mean, rstd, partials, rows, len: len32 };
        // SAFETY: as above; the partial sums are one for each block of the grid's second and third dimension.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    let [weight, bias] = sum_affine(op, gpu, &partials, dtype, [wants[1], wants[2]])?;
    Ok(Gradients { input: of_input, weight, bias })
}

/// The gradients of scale and shift that are wanted, in the dtype of arithmetic, from partial sums (samples, pieces, 2, len) of inputs of `dtype`.
pub(super) fn sum_affine(
    op: &'static str,
    gpu: &Gpu,
    partials: &Raw,
    dtype: DType,
    wants: [bool; 2],
) -> Result<[Option<Raw>; 2]> {
    let (samples, pieces, _, len) = partials.dims4()?;
    let result = |wanted: bool| wanted.then(|| empty(op, gpu, &[samples, len], accumulator(dtype))).transpose();
    let sums = [result(wants[0])?, result(wants[1])?];
    if partials.elem_count() > 0 {
        let function = gpu.function(&NORM_AFFINE_SUM, suffix(op, dtype)?)?;
        let shape = Shape { grid: [len.div_ceil(32) as u32, 2, samples as u32], block: [32, 16, 1], shared: 0 };
        let arguments = NormAffineSum {
            partials: input(op, partials)?,
            dweight: optional_output(op, sums[0].as_ref())?,
            dbias: optional_output(op, sums[1].as_ref())?,
            pieces: count32(op, pieces)?,
            len: count32(op, len)?,
            // The sums stay in f32, where gradients of parameters are collected.
            affine_f32: u32::from(dtype != DType::F64),
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(sums)
}

/// The sizes of a group norm over (batch, positions, channels).
#[derive(Clone, Copy)]
pub struct Groups {
    pub batch: usize,
    pub positions: usize,
    pub channels: usize,
    pub groups: usize,
}

/// How `include/channels.cuh` splits the work.
struct Split {
    tiles: usize,
    pieces: usize,
    over_tensor: Shape,
    over_groups: Shape,
}

impl Groups {
    fn split(&self, dtype: DType) -> Split {
        const THREADS: usize = 320;
        let packs = self.channels.div_ceil(wide(dtype)).max(1);
        let tiles = packs.div_ceil(THREADS);
        let columns = packs.div_ceil(tiles);
        let lines = (THREADS / columns).max(1);
        let most = (256 / (self.batch * tiles).max(1)).max(1);
        let pieces = self.positions.div_ceil(8 * lines).clamp(1, most);
        let threads = 32 * (columns * lines).div_ceil(32) as u32;
        let over_tensor =
            Shape { grid: [(self.batch * pieces) as u32, tiles as u32, 1], block: [threads, 1, 1], shared: 0 };
        let groups = (self.batch * self.groups) as u32;
        let over_groups = Shape { grid: [groups, 1, 1], block: [128, 1, 1], shared: 0 };
        Split { tiles, pieces, over_tensor, over_groups }
    }

    fn partials(&self, op: &'static str, gpu: &Gpu, split: &Split, dtype: DType) -> Result<Raw> {
        empty(op, gpu, &[self.batch, split.tiles, self.groups, split.pieces, 2], accumulator(dtype))
    }
}

/// Group norm of a dense tensor, followed by SiLU if `silu`, with the mean and 1/√(var + eps) of each group.
pub fn groups(
    op: &'static str,
    silu: bool,
    x: &Raw,
    size: Groups,
    parameters: [Option<&Raw>; 2],
    eps: f64,
) -> Result<(Raw, Raw, Raw)> {
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, parameters)?;
    let y = empty(op, gpu, x.dims(), dtype)?;
    let statistic = || empty(op, gpu, &[size.batch, size.groups], accumulator(dtype));
    let (mean, rstd) = (statistic()?, statistic()?);
    if y.elem_count() == 0 {
        return Ok((y, mean, rstd));
    }
    let split = size.split(dtype);
    let partials = size.partials(op, gpu, &split, dtype)?;
    let suffix = suffix(op, dtype)?;
    let (x, parts) = (input(op, x)?, output(op, &partials)?);
    let [positions, channels, groups] =
        [count32(op, size.positions)?, count32(op, size.channels)?, count32(op, size.groups)?];
    let (pieces, tiles) = (split.pieces as u32, split.tiles as u32);
    let statistics = GroupNormStatistics { x, partials: parts, positions, channels, groups, pieces };
    let (means, rstds) = (output(op, &mean)?, output(op, &rstd)?);
    let moments =
        GroupNormMoments { partials: parts, mean: means, rstd: rstds, positions, channels, groups, pieces, tiles, eps };
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
    // SAFETY: the tensors are dense and of these sizes; the partial sums are those of the split.
    unsafe {
        gpu.function(&GROUP_NORM_STATISTICS, suffix)?.launch(op, gpu, split.over_tensor, statistics)?;
        gpu.function(&GROUP_NORM_MOMENTS, suffix)?.launch(op, gpu, split.over_groups, moments)?;
        gpu.function(kernel, suffix)?.launch(op, gpu, split.over_tensor, forward)?;
    }
    Ok((y, mean, rstd))
}

/// The gradients of [`groups`]; `wants` are those of input, scale and shift. That of the input is added to the dense gradient `before`.
pub fn groups_backward(
    op: &'static str,
    silu: bool,
    saved: &Saved<'_>,
    size: Groups,
    wants: [bool; 3],
    before: Option<Pending>,
) -> Result<Gradients> {
    let Saved { x, grad, .. } = *saved;
    let gpu = Gpu::of(op, x)?;
    let dtype = x.dtype();
    let parameters = Parameters::new(dtype, [saved.weight, saved.bias])?;
    let (wants_input, wants_affine) = (wants[0], wants[1] || wants[2]);
    let dx = wants_input.then(|| destination(op, gpu, x, before.as_ref())).transpose()?;
    let split = size.split(dtype);
    let rows = size.batch * split.pieces;
    let affine = wants_affine.then(|| empty(op, gpu, &[1, rows, 2, size.channels], accumulator(dtype))).transpose()?;
    if x.elem_count() == 0 {
        let zeros = |wanted: bool| {
            wanted.then(|| super::copy::filled(x.device(), 0.0, &[size.channels], accumulator(dtype))).transpose()
        };
        return Ok(Gradients { input: dx, weight: zeros(wants[1])?, bias: zeros(wants[2])? });
    }
    let partials = size.partials(op, gpu, &split, dtype)?;
    let slopes = empty(op, gpu, &[size.batch, size.groups, 2], accumulator(dtype))?;
    let suffix = suffix(op, dtype)?;
    let (sums, backward) = if silu {
        (&GROUP_NORM_SILU_SUMS, &GROUP_NORM_SILU_BACKWARD)
    } else {
        (&GROUP_NORM_SUMS, &GROUP_NORM_BACKWARD)
    };
    let (x, grad) = (input(op, x)?, input(op, grad)?);
    let (mean, rstd) = (optional_input(op, saved.mean)?, input(op, saved.rstd)?);
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
        affine_partials: optional_output(op, affine.as_ref())?,
        positions,
        channels,
        groups,
        pieces,
        affine_f32,
    };
    // SAFETY: the tensors are dense and of these sizes; the partial sums are those of the split.
    unsafe { gpu.function(sums, suffix)?.launch(op, gpu, split.over_tensor, arguments) }?;
    if let Some(dx) = &dx {
        let joined = GroupNormSlopes {
            partials,
            rstd,
            slopes: output(op, &slopes)?,
            positions,
            channels,
            groups,
            pieces,
            tiles,
        };
        let arguments = GroupNormBackward {
            x,
            grad,
            before: optional_input(op, before.as_ref().map(|pending| &pending.sum))?,
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
            gpu.function(&GROUP_NORM_SLOPES, suffix)?.launch(op, gpu, split.over_groups, joined)?;
            gpu.function(backward, suffix)?.launch(op, gpu, split.over_tensor, arguments)?;
        }
    }
    let [weight, bias] = match &affine {
        Some(affine) => sum_affine(op, gpu, affine, dtype, [wants[1], wants[2]])?,
        None => [None, None],
    };
    Ok(Gradients { input: dx, weight, bias })
}
