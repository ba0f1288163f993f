//! Losses: sums over pairs of tensors, and the cross-entropy of logits.

use candle_core::DType;
use trainable_candle_cuda::modules::{CROSS_ENTROPY, REGRESSION};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::index::id_bytes;
use super::launch::{Shape, accumulator, address, count32, empty, launch, optional, suffix, wide};
use crate::{Raw, Result};

/// The sum of the losses of all pairs times `factor`, a number; `function` is the elementwise kernel of one pair's loss.
pub fn total(op: &'static str, function: &'static str, [a, b]: [&Raw; 2], threshold: f64, factor: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, a)?;
    let kernel = match function {
        "square" => "mse_loss_sum",
        "absolute" => "l1_loss_sum",
        "huber" => "huber_loss_sum",
        _ => "smooth_l1_loss_sum",
    };
    let (a, b) = (contiguous(a)?, contiguous(b)?);
    let (dtype, len) = (a.dtype(), a.elem_count());
    let blocks = len.div_ceil(2048 * wide(dtype)).clamp(1, 1024);
    let partials = empty(op, gpu, &[blocks], DType::F64)?;
    let y = empty(op, gpu, &[], dtype)?;
    let (sum, join) = (
        gpu.function(&REGRESSION, kernel, suffix(op, dtype)?)?,
        gpu.function(&REGRESSION, "loss_total", suffix(op, dtype)?)?,
    );
    let (first, second, parts, to) = (address(op, &a)?, address(op, &b)?, address(op, &partials)?, address(op, &y)?);
    let (len, count) = (len as u64, blocks as u32);
    // SAFETY: the kernels take the dense operands, a sum of each block, the result, their sizes and numbers.
    unsafe {
        launch!(op, gpu, sum, Shape::linear(op, blocks, 256)?, first, second, parts, len, threshold)?;
        launch!(op, gpu, join, Shape::linear(op, 1, 256)?, parts, to, count, factor)?;
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
        let function = gpu.function(&CROSS_ENTROPY, "cross_entropy_forward", suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let (from, at, to, sums) =
            (address(op, &x)?, address(op, &targets.ids)?, address(op, &losses)?, address(op, &lse)?);
        let (board, ignored, bytes) = (gpu.board().place(op), targets.ignore_index, id_bytes(op, &targets.ids)?);
        let [rows, outer, inner] = [rows as u64, 0, len as u64];
        let len = count32(op, len)?;
        // SAFETY: the kernel takes the dense logits, their targets, the results, where to note a target out of range, sizes and numbers.
        unsafe {
            launch!(
                op, gpu, function, shape, from, at, to, sums, board, rows, rows, outer, inner, len, ignored, bytes,
                smoothing
            )
        }?;
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
    let function = gpu.function(&CROSS_ENTROPY, "cross_entropy_total", suffix(op, dtype)?)?;
    let (from, at, to, by) =
        (address(op, losses)?, address(op, &targets.ids)?, address(op, &result)?, address(op, &divisor)?);
    let (rows, ignored, bytes, mean) =
        (targets.len() as u64, targets.ignore_index, id_bytes(op, &targets.ids)?, u32::from(mean));
    // SAFETY: the kernel takes the loss and the target of each row, two results, and numbers.
    unsafe { launch!(op, gpu, function, Shape::linear(op, 1, 1024)?, from, at, to, by, rows, ignored, bytes, mean) }?;
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
        let function = gpu.function(&CROSS_ENTROPY, "cross_entropy_backward", suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let (from, sums, at) = (address(op, &x)?, address(op, lse)?, address(op, &targets.ids)?);
        let (g, by, to) = (address(op, &grad)?, optional(op, divisor)?, address(op, &dx)?);
        let [rows, outer, inner] = [rows as u64, 0, len as u64];
        let (len, ignored, bytes) = (count32(op, len)?, targets.ignore_index, id_bytes(op, &targets.ids)?);
        let of_rows = u32::from(of_rows);
        // SAFETY: the kernel takes the dense logits, what their gradient is made from, the result, sizes and numbers.
        unsafe {
            launch!(
                op, gpu, function, shape, from, sums, at, g, by, to, rows, rows, outer, inner, len, ignored, bytes,
                smoothing, of_rows
            )
        }?;
    }
    Ok(dx)
}
