//! The CUDA form of gated linear units: `kernels/gated.cu`.

use trainable_candle_cuda::kernels::gated::{GegluBackward, GegluForward};

use crate::cuda::launch::{Shape, count32, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous};
use crate::{Raw, Result};

/// Computes the gated linear unit `op`, `geglu` or `swiglu`: `x (..., 2 width)` → `(..., width)`. A row of `x` has the
/// `width` features, then their gates.
pub fn forward(op: &'static str, x: &Raw, width: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    let y = empty(op, gpu, &dims, x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.named(op, "_forward", suffix(op, x.dtype())?)?;
        let (rows, width) = ((y.elem_count() / width) as u64, count32(op, width)?);
        // A thread computes about 16 bytes of `y`.
        let shape = Shape::flat(y.elem_count(), wide(x.dtype()));
        // The kernels of both units have the same parameters.
        let arguments = GegluForward { x: input(op, &x)?, y: output(op, &y)?, rows, width };
        // SAFETY: both tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// Computes the gradient of the `x` of [`forward`] from `grad`, the gradient of its result.
pub fn backward(op: &'static str, x: &Raw, grad: &Raw, width: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let (x, grad) = (contiguous(x)?, contiguous(grad)?);
    let dx = empty(op, gpu, x.dims(), x.dtype())?;
    if dx.elem_count() > 0 {
        let function = gpu.named(op, "_backward", suffix(op, x.dtype())?)?;
        let (rows, width) = ((grad.elem_count() / width) as u64, count32(op, width)?);
        let shape = Shape::flat(grad.elem_count(), wide(x.dtype()));
        let (x, grad) = (input(op, &x)?, input(op, &grad)?);
        // The kernels of both units have the same parameters.
        let arguments = GegluBackward { x, grad, dx: output(op, &dx)?, rows, width };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(dx)
}
