//! Losses: sums over pairs of tensors, and the cross-entropy of logits.

use candle_core::DType;
use trainable_candle_cuda::modules::{CROSS_ENTROPY, REGRESSION};

use super::copy::{cast, contiguous, filled};
use super::gpu::Gpu;
use super::index::classes;
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

/// The loss and the log-sum-exp of each row of `logits (..., classes)` in the dtype of arithmetic; 0 where there is no target.
pub fn cross_entropy(op: &'static str, logits: &Raw, targets: &[Option<usize>], smoothing: f64) -> Result<(Raw, Raw)> {
    let gpu = Gpu::of(op, logits)?;
    let x = contiguous(logits)?;
    let (dtype, rows) = (x.dtype(), targets.len());
    let losses = empty(op, gpu, &[rows], accumulator(dtype))?;
    let lse = empty(op, gpu, &[rows], accumulator(dtype))?;
    if rows > 0 {
        let ids = classes(targets, &x)?;
        let function = gpu.function(&CROSS_ENTROPY, "cross_entropy_forward", suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let (from, at, to, sums, none) =
            (address(op, &x)?, address(op, &ids)?, address(op, &losses)?, address(op, &lse)?, 0u64);
        let [rows, outer, inner] = [rows as u64, 0, len as u64];
        let (len, ignored, bytes) = (count32(op, len)?, -1i64, 8u32);
        // SAFETY: the kernel takes the dense logits, their targets, the results, sizes and numbers.
        unsafe {
            launch!(
                op, gpu, function, shape, from, at, to, sums, none, rows, rows, outer, inner, len, ignored, bytes,
                smoothing
            )
        }?;
    }
    Ok((losses, lse))
}

/// The gradient of the logits, from that of each row's loss (`of_rows`) or of the number that the losses were summed to, divided by
/// `divisor`.
pub fn cross_entropy_backward(
    op: &'static str,
    [logits, lse, grad]: [&Raw; 3],
    targets: &[Option<usize>],
    divisor: Option<f64>,
    of_rows: bool,
    smoothing: f64,
) -> Result<Raw> {
    let gpu = Gpu::of(op, logits)?;
    let x = contiguous(logits)?;
    let grad = contiguous(&cast(grad, x.dtype())?)?;
    let (dtype, rows) = (x.dtype(), targets.len());
    let dx = empty(op, gpu, x.dims(), dtype)?;
    if dx.elem_count() > 0 {
        let ids = classes(targets, &x)?;
        let divisor = divisor.map(|divisor| filled(x.device(), divisor, &[], accumulator(dtype))).transpose()?;
        let function = gpu.function(&CROSS_ENTROPY, "cross_entropy_backward", suffix(op, dtype)?)?;
        let len = x.dims()[x.rank() - 1];
        let shape = Shape::rows(rows, len, dtype);
        let (from, sums, at) = (address(op, &x)?, address(op, lse)?, address(op, &ids)?);
        let (g, by, to) = (address(op, &grad)?, optional(op, divisor.as_ref())?, address(op, &dx)?);
        let [rows, outer, inner] = [rows as u64, 0, len as u64];
        let (len, ignored, bytes, of_rows) = (count32(op, len)?, -1i64, 8u32, u32::from(of_rows));
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
