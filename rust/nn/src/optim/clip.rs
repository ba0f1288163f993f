//! Gradient clipping by the global norm, as `torch.nn.utils.clip_grad_norm_`.

use trainable_candle_core::cpu::pool::par_chunks_mut;
use trainable_candle_core::cpu::{Elem, Real, dispatch};
use trainable_candle_core::raw::{Raw, own_copy};
use trainable_candle_core::{Error, Result, Var, dispatch_float};

/// Elements that one thread sums at a time.
const CHUNK: usize = 1 << 14;

/// The norm of the vector that all gradients together form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormType {
    /// The root of the sum of squares.
    #[default]
    L2,
    /// The largest magnitude.
    Inf,
}

/// The norm of the gradients of `params` (0 if none has one). Sums are made in f64 in an order that depends on sizes alone.
///
/// # Errors
/// [`Error::Device`] if a gradient is not on the CPU.
pub fn grad_norm(params: &[Var], norm_type: NormType) -> Result<f64> {
    let mut norm = 0f64;
    for grad in params.iter().filter_map(Var::grad_storage) {
        let part = partial(&grad, norm_type)?;
        norm = match norm_type {
            NormType::L2 => norm + part,
            NormType::Inf => larger(norm, part),
        };
    }
    Ok(if norm_type == NormType::L2 { norm.sqrt() } else { norm })
}

/// Scales the gradients of `params` by `max_norm / (norm + 1e-6)` if that is less than 1, and returns their `norm` before.
///
/// A norm that is not finite makes the gradients zero or NaN, as in torch, unless `error_if_nonfinite` is set.
///
/// # Errors
/// [`Error::Argument`] if `max_norm` is negative or NaN; [`Error::NonFinite`] if `error_if_nonfinite` is set and the norm is not
/// finite: the gradients stay as they are then.
pub fn clip_grad_norm_(params: &[Var], max_norm: f64, norm_type: NormType, error_if_nonfinite: bool) -> Result<f64> {
    const OP: &str = "clip_grad_norm_";
    if max_norm.is_nan() || max_norm < 0.0 {
        return Err(Error::argument(OP, format!("found max_norm {max_norm}, expected a number of at least 0")));
    }
    let norm = grad_norm(params, norm_type)?;
    if error_if_nonfinite && !norm.is_finite() {
        let message = format!("the norm of the gradients is {norm}; lower the learning rate or skip this step");
        return Err(Error::NonFinite { op: OP, message });
    }
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 || factor.is_nan() {
        for var in params {
            var.scale_grad(factor)?;
        }
    }
    Ok(norm)
}

/// The sum of squares or the largest magnitude.
fn partial(grad: &Raw, norm_type: NormType) -> Result<f64> {
    const OP: &str = "grad_norm";
    let grad = if grad.is_contiguous() { grad.clone() } else { own_copy(grad)? };
    let (storage, layout) = grad.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        return Err(Error::device(OP, "a gradient is not on the CPU"));
    };
    dispatch_float!(grad.dtype(), OP, T => {
        let data = &candle_core::WithDType::cpu_storage_as_slice(storage)?[layout.start_offset()..][..grad.elem_count()];
        Ok(partial_slice::<T>(data, norm_type))
    })
}

fn partial_slice<T: Elem>(data: &[T], norm_type: NormType) -> f64 {
    let mut chunks: Vec<(&[T], f64)> = data.chunks(CHUNK).map(|chunk| (chunk, 0.0)).collect();
    par_chunks_mut(&mut chunks, 1, |_, chunk| {
        let (data, part) = &mut chunk[0];
        *part = dispatch(
            #[inline(always)]
            || match norm_type {
                NormType::L2 => sum_of_squares(data),
                NormType::Inf => largest(data),
            },
        );
    });
    let parts = chunks.iter().map(|chunk| chunk.1);
    match norm_type {
        NormType::L2 => parts.sum(),
        NormType::Inf => parts.fold(0.0, larger),
    }
}

/// Partial sums that vectors hold side by side.
const LANES: usize = 16;

#[inline(always)]
fn sum_of_squares<T: Elem>(data: &[T]) -> f64 {
    let mut sums = [0f64; LANES];
    let (blocks, rest) = data.as_chunks::<LANES>();
    for block in blocks {
        for (sum, x) in sums.iter_mut().zip(block) {
            let x = x.to_acc().to_f64();
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        let x = x.to_acc().to_f64();
        *sum += x * x;
    }
    sums.iter().sum()
}

#[inline(always)]
fn largest<T: Elem>(data: &[T]) -> f64 {
    let mut maxima = [0f64; LANES];
    for block in data.chunks(LANES) {
        for (max, x) in maxima.iter_mut().zip(block) {
            *max = larger(*max, x.to_acc().to_f64().abs());
        }
    }
    maxima.into_iter().fold(0.0, larger)
}

/// The larger of two numbers, NaN if one is NaN.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}
