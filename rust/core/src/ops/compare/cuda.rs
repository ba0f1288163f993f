//! Comparisons on a CUDA device, by the kernels of `kernels/compare.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::compare::{COMPARE, Compare};

use crate::cuda::Gpu;
use crate::cuda::launch::{any_suffix, empty};
use crate::cuda::strided::{Member, strided};
use crate::{Raw, Result};

/// A u8 tensor of shape `dims`: 1 where the relation of `a` to `b` is among `relations`, else 0. `relations` is a sum
/// of 1 (less), 2 (equal), 4 (greater) and 8 (an operand is NaN). The operands already have this shape, or broadcast
/// to it.
pub(super) fn compare(op: &'static str, a: &Raw, b: &Raw, dims: &[usize], relations: u32) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let function = gpu.function(&COMPARE, any_suffix(op, a.dtype())?)?;
    let y = empty(op, gpu, dims, DType::U8)?;
    if y.elem_count() > 0 {
        let [result, a, b] = [Member::new(op, &y)?, Member::new(op, a)?, Member::new(op, b)?];
        // `tensors` has the sizes and strides of the three tensors, `shape` the grid and block of the launch.
        let (tensors, shape) = strided(op, dims, [result, a, b])?;
        let arguments = Compare { y: result.output(), a: a.input(), b: b.input(), tensors, relations };
        // SAFETY: with the strides in `tensors`, every access is inside of its tensor.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
