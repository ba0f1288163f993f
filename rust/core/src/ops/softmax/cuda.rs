//! The CUDA form of softmax and log-softmax: `kernels/softmax.cu`.

use trainable_candle_cuda::kernels::softmax::{SoftmaxBackward, SoftmaxForward};

use crate::cuda::Gpu;
use crate::cuda::launch::{Shape, count32, empty, input, output, rows_of, suffix};
use crate::{Raw, Result};

/// The operation `op` (`softmax` or `log_softmax`) over the last dimension of a dense tensor. The kernel's name begins
/// with `op`; the kernels of both operations have the same arguments.
pub fn forward(op: &'static str, x: &Raw) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.named(op, "_forward", suffix(op, x.dtype())?)?;
        let (rows, len) = rows_of(x);
        // The grid and the block of the launch.
        let shape = Shape::rows(rows, len, x.dtype());
        let (rows, len) = (rows as u64, count32(op, len)?);
        let arguments = SoftmaxForward { x: input(op, x)?, y: output(op, &y)?, rows, len };
        // SAFETY: both tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// The gradient of the argument `x` of [`forward`], from the result `y` of `forward` and the gradient `grad` of `y`.
/// Both are dense.
pub fn backward(op: &'static str, y: &Raw, grad: &Raw) -> Result<Raw> {
    let gpu = Gpu::of(op, y)?;
    let dx = empty(op, gpu, y.dims(), y.dtype())?;
    if dx.elem_count() > 0 {
        let function = gpu.named(op, "_backward", suffix(op, y.dtype())?)?;
        let (rows, len) = rows_of(y);
        // The grid and the block of the launch.
        let shape = Shape::rows(rows, len, y.dtype());
        let (rows, len) = (rows as u64, count32(op, len)?);
        let (y, grad) = (input(op, y)?, input(op, grad)?);
        let arguments = SoftmaxBackward { y, grad, dx: output(op, &dx)?, rows, len };
        // SAFETY: the tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(dx)
}
