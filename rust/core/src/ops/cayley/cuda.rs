//! The CUDA form of `cayley`, which launches `kernels/cayley.cu`. From `upper`, the elements above the diagonals of
//! skew-symmetric matrices Q, the operation computes `change`, the matrices D = (I - Q) (I + Q)⁻¹ - I.

use trainable_candle_cuda::kernels::cayley::{CAYLEY_BACKWARD, CAYLEY_FORWARD, CayleyBackward, CayleyForward};

use super::CAYLEY;
use crate::cuda::launch::{Shape, count32, empty, input, output, suffix};
use crate::cuda::{Gpu, contiguous};
use crate::{DType, Error, Raw, Result};

/// Bytes of shared memory that a block of threads may use on every supported GPU.
const SHARED: usize = 96 << 10;

/// The launch shape for `count` matrices: one block of threads per matrix, or fewer blocks where a grid cannot have as
/// many. The shared memory of a block holds two matrices.
fn shape(count: usize, size: usize, dtype: DType) -> Result<Shape> {
    let shared = 2 * size * size * if dtype == DType::F64 { 8 } else { 4 };
    if shared > SHARED {
        return Err(Error::shape(
            CAYLEY.name,
            format!(
                "two matrices of {size} x {size} need {shared} bytes of shared memory, but {SHARED} are available; use smaller \
                 matrices (for OFT, a smaller oft_block_size)"
            ),
        ));
    }
    Ok(Shape { grid: [count.min(i32::MAX as usize) as u32, 1, 1], block: [32, 8, 1], shared: shared as u32 })
}

/// Computes D from `upper (count, size (size - 1) / 2)`. `[count, size, size]` is the shape of the result.
pub(super) fn forward(upper: &Raw, [count, size, _]: [usize; 3]) -> Result<Raw> {
    let op = CAYLEY.name;
    let gpu = Gpu::of(op, upper)?;
    let upper = contiguous(upper)?;
    let change = empty(op, gpu, &[count, size, size], upper.dtype())?;
    if change.elem_count() > 0 {
        let arguments = CayleyForward {
            upper: input(op, &upper)?,
            change: output(op, &change)?,
            count: count as u64,
            size: count32(op, size)?,
        };
        let kernel = gpu.function(&CAYLEY_FORWARD, suffix(op, upper.dtype())?)?;
        // SAFETY: the matrices are dense and have the sizes in the arguments.
        unsafe { kernel.launch(op, gpu, shape(count, size, upper.dtype())?, arguments) }?;
    }
    Ok(change)
}

/// Computes the gradient of `upper` from D and its gradient `grad`, both (count, size, size).
pub(super) fn backward(grad: &Raw, change: &Raw) -> Result<Raw> {
    let op = CAYLEY.name;
    let gpu = Gpu::of(op, grad)?;
    let (grad, change) = (contiguous(grad)?, contiguous(change)?);
    let (count, size) = (grad.dims()[0], grad.dims()[1]);
    let grad_upper = empty(op, gpu, &[count, size * (size - 1) / 2], grad.dtype())?;
    if grad_upper.elem_count() > 0 {
        let arguments = CayleyBackward {
            grad: input(op, &grad)?,
            change: input(op, &change)?,
            grad_upper: output(op, &grad_upper)?,
            count: count as u64,
            size: count32(op, size)?,
        };
        let kernel = gpu.function(&CAYLEY_BACKWARD, suffix(op, grad.dtype())?)?;
        // SAFETY: the matrices are dense and have the sizes in the arguments.
        unsafe { kernel.launch(op, gpu, shape(count, size, grad.dtype())?, arguments) }?;
    }
    Ok(grad_upper)
}
