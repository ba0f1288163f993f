//! The CUDA form of the sums of elementwise losses of two tensors, such as squared errors: `kernels/regression.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::regression::{LOSS_TOTAL, LossTotal, SquareSum};

use crate::cuda::launch::{Shape, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous};
use crate::{Raw, Result};

/// A scalar: `factor` times the sum of a loss over all pairs of elements of `a` and `b`. `loss` is the name of the
/// loss, and `threshold` its parameter. The structure `SquareSum` has the arguments of the sums of all losses.
pub fn total(op: &'static str, loss: &'static str, [a, b]: [&Raw; 2], threshold: f64, factor: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let (a, b) = (contiguous(a)?, contiguous(b)?);
    let (dtype, len) = (a.dtype(), a.elem_count());
    // Each block writes one partial sum. It has 256 threads, and each thread adds 8 packs of `wide` elements: 2048
    // packs a block. The threads add more if there are more than 1024 · 2048 packs, because there are at most 1024
    // blocks.
    let blocks = len.div_ceil(2048 * wide(dtype)).clamp(1, 1024);
    let partials = empty(op, gpu, &[blocks], DType::F64)?;
    let y = empty(op, gpu, &[], dtype)?;
    let (sum, join) = (gpu.named(loss, "_sum", suffix(op, dtype)?)?, gpu.function(&LOSS_TOTAL, suffix(op, dtype)?)?);
    let (a, b, partials_output) = (input(op, &a)?, input(op, &b)?, output(op, &partials)?);
    let sums = SquareSum { a, b, partials: partials_output, len: len as u64, parameter: threshold };
    let total = LossTotal { partials: input(op, &partials)?, result: output(op, &y)?, count: blocks as u32, factor };
    // SAFETY: the operands are dense and have `len` elements, and each block has a place for its partial sum.
    unsafe {
        sum.launch(op, gpu, Shape::linear(op, blocks, 256)?, sums)?;
        join.launch(op, gpu, Shape::linear(op, 1, 256)?, total)?;
    }
    Ok(y)
}
