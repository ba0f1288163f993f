//! The CUDA form of selection by a mask: `kernels/select.cu`.

use trainable_candle_cuda::kernels::select::{SELECT, Select};

use crate::cuda::Gpu;
use crate::cuda::launch::{Const, Mut, byte_suffix, empty};
use crate::cuda::strided::{Member, strided};
use crate::{Raw, Result};

/// `a` where `mask` (u8) is not 0, else `b`. The operands broadcast to `dims`; `a` and `b` have one dtype.
pub(super) fn select(op: &'static str, mask: &Raw, a: &Raw, b: &Raw, dims: &[usize]) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    // The kernel only copies elements, so there is one kernel for each size of an element.
    let function = gpu.function(&SELECT, byte_suffix(a.dtype()))?;
    let y = empty(op, gpu, dims, a.dtype())?;
    if y.elem_count() > 0 {
        let members = [Member::new(op, &y)?, Member::new(op, mask)?, Member::new(op, a)?, Member::new(op, b)?];
        let (tensors, shape) = strided(op, dims, members)?;
        let [result, mask, a, b] = members;
        let [a, b] = [a, b].map(|from| Const::new(from.address, from.unsigned_element()));
        let y = Mut::new(result.address, result.unsigned_element());
        let arguments = Select { y, mask: mask.input(), a, b, tensors };
        // SAFETY: the strides stay inside of the tensors.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
