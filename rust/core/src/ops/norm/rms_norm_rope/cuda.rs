//! The CUDA form of RMS norm followed by rotary position embedding: `kernels/rms_norm_rope.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::rms_norm_rope::{
    RMS_NORM_ROPE_BACKWARD, RMS_NORM_ROPE_FORWARD, RMS_NORM_ROPE_WEIGHT, RmsNormRopeBackward, RmsNormRopeForward,
    RmsNormRopeWeight,
};

use super::{RMS_NORM_ROPE, RmsNormRopeBackward as Norm, Rotation};
use crate::cuda::launch::{Const, Shape, accumulator, count32, empty, input, optional_input, output, suffix, wide};
use crate::cuda::{Gpu, cast, contiguous};
use crate::ops::norm::cuda::{Gradients, Wanted, sum_affine};
use crate::tape::BackwardContext;
use crate::{Raw, Result};

/// The arguments that the kernels share, without `x`, gradients and results. The kernels get addresses of `tables` and
/// `weight`; owning the tensors here keeps these addresses valid.
struct Arguments {
    /// cos and sin.
    tables: [Raw; 2],
    weight: Option<Raw>,
    rows: u64,
    /// Number of rows of cos and sin.
    positions: u32,
    /// How many successive rows of `x` have the same position.
    repeats: u32,
    /// Number of elements of a row of `x`.
    width: u32,
    interleaved: u32,
    shape: Shape,
}

impl Arguments {
    fn new(op: &'static str, x: &Raw, weight: Option<&Raw>, rotation: &Rotation<'_>) -> Result<Self> {
        let [cos, sin] = rotation.tables;
        let converted = |table: &Raw| contiguous(&cast(table, accumulator(x.dtype()))?);
        let (positions, half) = (cos.dims()[0], cos.dims()[1]);
        Ok(Self {
            tables: [converted(cos)?, converted(sin)?],
            weight: weight.map(contiguous).transpose()?,
            rows: (x.elem_count() / (2 * half).max(1)) as u64,
            positions: count32(op, positions)?,
            repeats: count32(op, rotation.repeats)?,
            width: count32(op, 2 * half)?,
            interleaved: u32::from(rotation.interleaved),
            // Each thread has two packs of 16 bytes (`wide` features). The rotation pairs the features of one pack with
            // those of the other, or neighbours if `interleaved`.
            shape: Shape::flat(x.elem_count(), 2 * wide(x.dtype())),
        })
    }

    /// The addresses of cos, sin and the weight.
    fn addresses(&self, op: &'static str) -> Result<[Const; 3]> {
        let [cos, sin] = &self.tables;
        Ok([input(op, cos)?, input(op, sin)?, optional_input(op, self.weight.as_ref())?])
    }

    fn weight_is_f32(&self) -> u32 {
        u32::from(self.weight.as_ref().is_some_and(|weight| weight.dtype() == DType::F32))
    }
}

/// Returns the normalised and rotated rows of a dense `x (..., width)`, and 1/√(mean(x²) + eps) of each row.
pub(super) fn forward(
    op: &'static str,
    x: &Raw,
    weight: Option<&Raw>,
    rotation: &Rotation<'_>,
    eps: f64,
) -> Result<[Raw; 2]> {
    let gpu = Gpu::of(op, x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    let rstd = empty(op, gpu, &[x.dims()[..x.rank() - 1].iter().product()], accumulator(x.dtype()))?;
    if y.elem_count() > 0 {
        let arguments = Arguments::new(op, x, weight, rotation)?;
        let &Arguments { rows, positions, repeats, width, interleaved, shape, .. } = &arguments;
        let function = gpu.function(&RMS_NORM_ROPE_FORWARD, suffix(op, x.dtype())?)?;
        let [cos, sin, weight] = arguments.addresses(op)?;
        let arguments = RmsNormRopeForward {
            x: input(op, x)?,
            weight,
            cos,
            sin,
            y: output(op, &y)?,
            rstd: output(op, &rstd)?,
            rows,
            positions,
            repeats,
            width,
            eps,
            weight_f32: arguments.weight_is_f32(),
            interleaved,
        };
        // SAFETY: the tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok([y, rstd])
}

/// Adds to `context` those gradients of `x` and of the weight that are needed. `saved` is `x` and the gradient of the
/// result, both dense with rows in the order of `norm.order`, and 1/√(mean(x²) + eps) of each row.
pub(super) fn backward(
    norm: &Norm,
    context: &mut BackwardContext<'_>,
    saved: [&Raw; 3],
    rotation: &Rotation<'_>,
) -> Result<()> {
    // The second parameter is the shift, which RMS norm does not have.
    let [weight, _] = norm.affine.parameters()?;
    let mut grads = gradients(saved, weight.as_ref(), rotation, &norm.affine.wanted(context))?;
    // `norm.order` describes in which order the input has the dimensions of heads and positions in memory. The gradient
    // of the input is in this order, and its dimensions must be swapped back.
    if let Some(grad) = grads.input.take() {
        let input = 0;
        context.add(input, norm.order.swap(&grad)?)?;
    }
    norm.affine.add_gradients(context, grads)
}

fn gradients(
    [x, grad, rstd]: [&Raw; 3],
    weight: Option<&Raw>,
    rotation: &Rotation<'_>,
    wanted: &Wanted,
) -> Result<Gradients> {
    let op = RMS_NORM_ROPE.name;
    let gpu = Gpu::of(op, x)?;
    let arguments = Arguments::new(op, x, weight, rotation)?;
    let &Arguments { rows, positions, repeats, width, interleaved, shape, .. } = &arguments;
    let [cos, sin, weight] = arguments.addresses(op)?;
    let mut grads = Gradients::default();
    let (x_address, grad, rstd) = (input(op, x)?, input(op, grad)?, input(op, rstd)?);
    if wanted.input {
        let dx = empty(op, gpu, x.dims(), x.dtype())?;
        if dx.elem_count() > 0 {
            let function = gpu.function(&RMS_NORM_ROPE_BACKWARD, suffix(op, x.dtype())?)?;
            let arguments = RmsNormRopeBackward {
                x: x_address,
                grad,
                weight,
                cos,
                sin,
                rstd,
                dx: output(op, &dx)?,
                rows,
                positions,
                repeats,
                width,
                weight_f32: arguments.weight_is_f32(),
                interleaved,
            };
            // SAFETY: the tensors are dense and have the sizes in the arguments.
            unsafe { function.launch(op, gpu, shape, arguments) }?;
        }
        grads.input = Some(dx);
    }
    if wanted.weight {
        // The rows are divided into pieces of about 64 rows or more. Each piece has partial sums of its own, which
        // `sum_affine` adds. `sum_affine` expects (samples, pieces, 2, width), where the 2 are scale and shift. Here
        // all rows are one sample, and there is no shift: the kernel does not write its sums.
        let pieces = (rows as usize).div_ceil(64).clamp(1, 512);
        let partials = empty(op, gpu, &[1, pieces, 2, width as usize], accumulator(x.dtype()))?;
        if width > 0 {
            let function = gpu.function(&RMS_NORM_ROPE_WEIGHT, suffix(op, x.dtype())?)?;
            // A block of 256 threads handles a tile of at most 32 pairs of packs (64 packs) in each row of its
            // piece.
            let tiles = (width as usize).div_ceil(64 * wide(x.dtype())) as u32;
            let shape = Shape { grid: [tiles, pieces as u32, 1], block: [256, 1, 1], shared: 0 };
            let arguments = RmsNormRopeWeight {
                x: x_address,
                grad,
                cos,
                sin,
                rstd,
                partials: output(op, &partials)?,
                rows,
                positions,
                repeats,
                width,
                interleaved,
            };
            // SAFETY: as above; `partials` has 2 x `width` numbers for each piece (the grid's second dimension).
            unsafe { function.launch(op, gpu, shape, arguments) }?;
        }
        // Only the gradient of the scale (the weight) is wanted, not that of the shift.
        [grads.weight, _] = sum_affine(op, gpu, &partials, x.dtype(), [true, false])?;
    }
    Ok(grads)
}
