//! The implementation for CUDA, with the kernel in `kernels/compare.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::compare::{COMPARE, Compare};

use crate::cuda::Gpu;
use crate::cuda::launch::{any_suffix, empty};
use crate::cuda::strided::{Member, strided};
use crate::{Raw, Result};

/// A u8 tensor: 1 where the relation of `a` to `b` is among `relations`, else 0. The operands broadcast to `dims`.
pub(super) fn compare(op: &'static str, a: &Raw, b: &Raw, dims: &[usize], relations: u32) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let function = gpu.function(&COMPARE, any_suffix(op, a.dtype())?)?;
    let y = empty(op, gpu, dims, DType::U8)?;
    if y.elem_count() > 0 {
        let [to, a, b] = [Member::new(op, &y)?, Member::new(op, a)?, Member::new(op, b)?];
        let (tensors, shape) = strided(op, dims, [to, a, b])?;
        let arguments = Compare { y: to.output(), a: a.input(), b: b.input(), tensors, relations };
        // SAFETY: the strides stay inside of the tensors.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
