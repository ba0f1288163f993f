//! Losses: sums over pairs of tensors, and the cross-entropy of logits.

use candle_core::DType;
use trainable_candle_cuda::kernels::cross_entropy::{
    CROSS_ENTROPY_BACKWARD, CROSS_ENTROPY_FORWARD, CROSS_ENTROPY_TOTAL, CrossEntropyBackward, CrossEntropyForward,
    CrossEntropyTotal,
};
use trainable_candle_cuda::kernels::regression::{
    HUBER_LOSS_SUM, L1_LOSS_SUM, LOSS_TOTAL, LossTotal, MSE_LOSS_SUM, MseLossSum, SMOOTH_L1_LOSS_SUM,
};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::index::id_bytes;
use super::launch::{Shape, accumulator, count32, empty, input, optional_input, output, suffix, wide};
use crate::{Raw, Result};

/// The sum of the losses of all pairs times `factor`, a number; `function` is the elementwise kernel of one pair's loss.
pub fn total(op: &'static str, function: &'static str, [a, b]: [&Raw; 2], threshold: f64, factor: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let kernel = match function {
        "square" => &MSE_LOSS_SUM,
        "absolute" => &L1_LOSS_SUM,
        "huber" => &HUBER_LOSS_SUM,
        _ => &SMOOTH_L1_LOSS_SUM,
    };
    let (a, b) = (contiguous(a)?, contiguous(b)?);
    let (dtype, len) = (a.dtype(), a.elem_count());
    let blocks = len.div_ceil(2048 * wide(dtype)).clamp(1, 1024);
    let partials = empty(op, gpu, &[blocks], DType::F64)?;
    let y = empty(op, gpu, &[], dtype)?;
    let (sum, join) = (gpu.function(kernel, suffix(op, dtype)?)?, gpu.function(&LOSS_TOTAL, suffix(op, dtype)?)?);
    let (a, b, parts) = (input(op, &a)?, input(op, &b)?, output(op, &partials)?);
    let sums = MseLossSum { a, b, partials: parts, len: len as u64, parameter: threshold };
    let total = LossTotal { partials: input(op, &partials)?, result: output(op, &y)?, count: blocks as u32, factor };
    // SAFETY: the operands are dense, of one length, and each block has a partial sum.
    unsafe {
        sum.launch(op, gpu, Shape::linear(op, blocks, 256)?, sums)?;
        join.launch(op, gpu, Shape::linear(op, 1, 256)?, total)?;
    }
    Ok(y)
}

/// Class ids of rows, and which of them means none.
#[derive(Clone)]
pub struct Targets {
    /// i64 or u32, dense.
    ids: Raw,
    ignore_index: i64,
}

impl Targets {
    /// Nothing is read: a target that is out of range is noted on the device's board, and its loss is NaN.
    pub fn new(op: &'static str, ids: &Raw, ignore_index: i64) -> Result<Self> {
        id_bytes(op, ids)?;
        Ok(Self { ids: contiguous(ids)?, ignore_index })
    }

    fn len(&self) -> usize {
        self.ids.elem_count()
    }
}

/// The loss and the log-sum-exp of each row of `logits (..., classes)` in the dtype of arithmetic; 0 where there is no target.
pub fn cross_entropy(op: &'static str, logits: &Raw, targets: &Targets, smoothing: f64) -> Result<(Raw, Raw)> {
    let gpu = Gpu::of(op, logits)?;
    let x = contiguous(logits)?;
    let (dtype, rows) = (x.dtype(), targets.len());
    let losses = empty(op, gpu, &[rows], accumulator(dtype))?;
    let lse = empty(op, gpu, &[rows], accumulator(dtype))?;
    if rows > 0 {
        let function = gpu.function(&CROSS_ENTROPY_FORWARD, suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let arguments = CrossEntropyForward {
            x: input(op, &x)?,
            targets: input(op, &targets.ids)?,
            losses: output(op, &losses)?,
            lse: output(op, &lse)?,
            out_of_range: gpu.board().place(op),
            rows: rows as u64,
            inner: rows as u64,
            outer_stride: 0,
            inner_stride: len as u64,
            classes: count32(op, len)?,
            ignore_index: targets.ignore_index,
            id_bytes: id_bytes(op, &targets.ids)?,
            smoothing,
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok((losses, lse))
}

/// The sum of the losses of rows, or the mean of those that have a target, in `dtype`; and what the sum was divided by.
pub fn cross_entropy_total(
    op: &'static str,
    losses: &Raw,
    targets: &Targets,
    mean: bool,
    dtype: DType,
) -> Result<(Raw, Raw)> {
    let gpu = Gpu::of(op, losses)?;
    let result = empty(op, gpu, &[], dtype)?;
    let divisor = empty(op, gpu, &[], accumulator(dtype))?;
    let function = gpu.function(&CROSS_ENTROPY_TOTAL, suffix(op, dtype)?)?;
    let arguments = CrossEntropyTotal {
        losses: input(op, losses)?,
        targets: input(op, &targets.ids)?,
        result: output(op, &result)?,
        divisor: output(op, &divisor)?,
        rows: targets.len() as u64,
        ignore_index: targets.ignore_index,
        id_bytes: id_bytes(op, &targets.ids)?,
        mean: u32::from(mean),
    };
    // SAFETY: there is a loss and a target for each row.
    unsafe { function.launch(op, gpu, Shape::linear(op, 1, 1024)?, arguments) }?;
    Ok((result, divisor))
}

/// The gradient of the logits, from that of each row's loss (`of_rows`) or of the number that the losses were summed to, divided by
/// `divisor`.
pub fn cross_entropy_backward(
    op: &'static str,
    [logits, lse, grad]: [&Raw; 3],
    targets: &Targets,
    divisor: Option<&Raw>,
    of_rows: bool,
    smoothing: f64,
) -> Result<Raw> {
    let gpu = Gpu::of(op, logits)?;
    let x = contiguous(logits)?;
    let grad = contiguous(&cast(grad, x.dtype())?)?;
    let (dtype, rows) = (x.dtype(), targets.len());
    let dx = empty(op, gpu, x.dims(), dtype)?;
    if dx.elem_count() > 0 {
        let function = gpu.function(&CROSS_ENTROPY_BACKWARD, suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let arguments = CrossEntropyBackward {
            x: input(op, &x)?,
            lse: input(op, lse)?,
            targets: input(op, &targets.ids)?,
            grad: input(op, &grad)?,
            divisor: optional_input(op, divisor)?,
            dx: output(op, &dx)?,
            rows: rows as u64,
            inner: rows as u64,
            outer_stride: 0,
            inner_stride: len as u64,
            classes: count32(op, len)?,
            ignore_index: targets.ignore_index,
            id_bytes: id_bytes(op, &targets.ids)?,
            smoothing,
            of_rows: u32::from(of_rows),
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(dx)
}
