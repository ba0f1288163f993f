//! The CUDA form of sums: `kernels/regression.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::regression::{LOSS_TOTAL, LossTotal, SquareSum};

use crate::cuda::launch::{Shape, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous};
use crate::{Raw, Result};

/// A scalar: `factor` times the sum of the elementwise function `loss` over all pairs of elements.
pub fn total(op: &'static str, loss: &'static str, [a, b]: [&Raw; 2], threshold: f64, factor: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let (a, b) = (contiguous(a)?, contiguous(b)?);
    let (dtype, len) = (a.dtype(), a.elem_count());
    let blocks = len.div_ceil(2048 * wide(dtype)).clamp(1, 1024);
    let partials = empty(op, gpu, &[blocks], DType::F64)?;
    let y = empty(op, gpu, &[], dtype)?;
    let (sum, join) = (gpu.named(loss, "_sum", suffix(op, dtype)?)?, gpu.function(&LOSS_TOTAL, suffix(op, dtype)?)?);
    let (a, b, parts) = (input(op, &a)?, input(op, &b)?, output(op, &partials)?);
    let sums = SquareSum { a, b, partials: parts, len: len as u64, parameter: threshold };
    let total = LossTotal { partials: input(op, &partials)?, result: output(op, &y)?, count: blocks as u32, factor };
    // SAFETY: the operands are dense, of one length, and each block has a partial sum.
    unsafe {
        sum.launch(op, gpu, Shape::linear(op, blocks, 256)?, sums)?;
        join.launch(op, gpu, Shape::linear(op, 1, 256)?, total)?;
    }
    Ok(y)
}
