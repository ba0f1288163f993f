//! RMS norm and rotary position embedding in one pass.

use candle_core::DType;
use trainable_candle_cuda::modules::RMS_NORM_ROPE;

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::launch::{Address, Shape, accumulator, address, count32, empty, launch, optional, suffix, wide};
use super::norm::{Gradients, sum_affine};
use crate::ops::norm::Turn;
use crate::{Raw, Result};

/// What the kernels take beside the tensors; the tensors keep the addresses good.
struct Arguments {
    tables: [Raw; 2],
    weight: Option<Raw>,
    rows: u64,
    positions: u32,
    repeats: u32,
    width: u32,
    interleaved: u32,
    shape: Shape,
}

impl Arguments {
    fn new(op: &'static str, x: &Raw, weight: Option<&Raw>, turn: &Turn<'_>) -> Result<Self> {
        let numbers = |table: &Raw| contiguous(&cast(table, accumulator(x.dtype()))?);
        let (positions, half) = (turn.tables[0].dims()[0], turn.tables[0].dims()[1]);
        Ok(Self {
            tables: [numbers(turn.tables[0])?, numbers(turn.tables[1])?],
            weight: weight.map(contiguous).transpose()?,
            rows: (x.elem_count() / (2 * half).max(1)) as u64,
            positions: count32(op, positions)?,
            repeats: count32(op, turn.repeats)?,
            width: count32(op, 2 * half)?,
            interleaved: u32::from(turn.interleaved),
            shape: Shape::flat(x.elem_count(), 2 * wide(x.dtype())),
        })
    }

    /// Where cos, sin and the weight are.
    fn addresses(&self, op: &'static str) -> Result<[Address; 3]> {
        let [cos, sin] = &self.tables;
        Ok([address(op, cos)?, address(op, sin)?, optional(op, self.weight.as_ref())?])
    }

    fn weight_is_f32(&self) -> u32 {
        u32::from(self.weight.as_ref().is_some_and(|weight| weight.dtype() == DType::F32))
    }
}

/// The turned, normalised rows of a dense (..., width), and 1/√(mean(x²) + eps) of each.
pub fn forward(op: &'static str, x: &Raw, weight: Option<&Raw>, turn: &Turn<'_>, eps: f64) -> Result<[Raw; 2]> {
    let gpu = Gpu::of(op, x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    let rstd = empty(op, gpu, &[x.dims()[..x.rank() - 1].iter().product()], accumulator(x.dtype()))?;
    if y.elem_count() > 0 {
        let arguments = Arguments::new(op, x, weight, turn)?;
        let &Arguments { rows, positions, repeats, width, interleaved, shape, .. } = &arguments;
        let function = gpu.function(&RMS_NORM_ROPE, "rms_norm_rope_forward", suffix(op, x.dtype())?)?;
        let [cos, sin, weight] = arguments.addresses(op)?;
        let (from, to, rstds, is_f32) =
            (address(op, x)?, address(op, &y)?, address(op, &rstd)?, arguments.weight_is_f32());
        // SAFETY: the kernel takes the input, the weight, the tables, the results, their sizes and numbers.
        unsafe {
            launch!(
                op,
                gpu,
                function,
                shape,
                from,
                weight,
                cos,
                sin,
                to,
                rstds,
                rows,
                positions,
                repeats,
                width,
                eps,
                is_f32,
                interleaved
            )
        }?;
    }
    Ok([y, rstd])
}

/// The gradients of [`forward`]; `wants` are those of the input and of the weight.
pub fn backward(
    op: &'static str,
    [x, grad, rstd]: [&Raw; 3],
    weight: Option<&Raw>,
    turn: &Turn<'_>,
    wants: [bool; 2],
) -> Result<Gradients> {
    let gpu = Gpu::of(op, x)?;
    let arguments = Arguments::new(op, x, weight, turn)?;
    let &Arguments { rows, positions, repeats, width, interleaved, shape, .. } = &arguments;
    let (from, g, rstds) = (address(op, x)?, address(op, grad)?, address(op, rstd)?);
    let [cos, sin, scale] = arguments.addresses(op)?;
    let mut grads = Gradients { input: None, weight: None, bias: None };
    if wants[0] {
        let dx = empty(op, gpu, x.dims(), x.dtype())?;
        if dx.elem_count() > 0 {
            let function = gpu.function(&RMS_NORM_ROPE, "rms_norm_rope_backward", suffix(op, x.dtype())?)?;
            let (to, is_f32) = (address(op, &dx)?, arguments.weight_is_f32());
            // SAFETY: the kernel takes what the gradient is made from, the result and their sizes.
            unsafe {
                launch!(
                    op,
                    gpu,
                    function,
                    shape,
                    from,
                    g,
                    scale,
                    cos,
                    sin,
                    rstds,
                    to,
                    rows,
                    positions,
                    repeats,
                    width,
                    is_f32,
                    interleaved
                )
            }?;
        }
        grads.input = Some(dx);
    }
    if wants[1] {
        let pieces = (rows as usize).div_ceil(64).clamp(1, 512);
        let partials = empty(op, gpu, &[1, pieces, 2, width as usize], accumulator(x.dtype()))?;
        if width > 0 {
            let function = gpu.function(&RMS_NORM_ROPE, "rms_norm_rope_weight", suffix(op, x.dtype())?)?;
            let tiles = (width as usize).div_ceil(64 * wide(x.dtype())) as u32;
            let shape = Shape { grid: [tiles, pieces as u32, 1], block: [256, 1, 1], shared: 0 };
            let to = address(op, &partials)?;
            // SAFETY: as above.
            unsafe {
                launch!(
                    op,
                    gpu,
                    function,
                    shape,
                    from,
                    g,
                    cos,
                    sin,
                    rstds,
                    to,
                    rows,
                    positions,
                    repeats,
                    width,
                    interleaved
                )
            }?;
        }
        [grads.weight, _] = sum_affine(op, gpu, &partials, x.dtype(), [true, false])?;
    }
    Ok(grads)
}
