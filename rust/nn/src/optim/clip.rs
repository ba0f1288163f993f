//! Gradient clipping by the global norm, as `torch.nn.utils.clip_grad_norm_`.

use trainable_candle_core::cpu::pool::par_chunks_mut;
use trainable_candle_core::cpu::{Elem, Real, dispatch};
use trainable_candle_core::flat::Gradients;
use trainable_candle_core::raw::{Raw, own_copy};
use trainable_candle_core::{Device, Error, Result, Tensor, Var, dispatch_float};

use super::cuda::{Clip, LossScale, scale_gradients};

const GRAD_NORM: &str = "grad_norm";
const CLIP_GRAD_NORM: &str = "clip_grad_norm_";

/// The number of elements that one thread reduces to a sum or a maximum at a time.
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

/// Returns the norm of the gradients of `params` (0 if none has a gradient), as a scalar f64 tensor on the device of
/// `params`. The norm is computed in f64, in an order that does not depend on the timing of threads. The host does not
/// wait for a CUDA device.
///
/// # Errors
/// [`Error::Device`] if gradients are on different devices.
pub fn grad_norm(params: &[Var], norm_type: NormType) -> Result<Tensor> {
    if let Some(device) = cuda_device(params) {
        // Nothing reads the clip factor, so any maximum will do.
        let max_norm = f64::INFINITY;
        return Ok(Tensor::from_raw(&clip(GRAD_NORM, params, &device, max_norm, norm_type)?.norm()?));
    }
    Tensor::new(host_norm(params, norm_type)?, &Device::Cpu)
}

/// Returns the CUDA device of `params`; `None` if no parameter is on a CUDA device.
pub(super) fn cuda_device(params: &[Var]) -> Option<Device> {
    params.iter().map(|var| var.device()).find(|device| device.is_cuda()).cloned()
}

/// Computes the norm of the gradients of `params`, and the factor that clips this norm to `max_norm`, both on the CUDA
/// device `device`.
pub(super) fn clip(
    op: &'static str,
    params: &[Var],
    device: &Device,
    max_norm: f64,
    norm_type: NormType,
) -> Result<Clip> {
    // `vectors` are gradients in long vectors, many variables in one; `unbound` are variables with separate gradients.
    let Gradients { mut vectors, unbound } = Gradients::of(params)?;
    vectors.extend(unbound.iter().filter_map(Var::grad_storage));
    let (is_max, loss_scale) = (norm_type == NormType::Inf, None);
    Clip::of(op, device, &vectors, is_max, max_norm, loss_scale)
}

/// Multiplies the gradients of `params`, which are on a CUDA device, by the factor of `clip`, if there is one, and
/// divides them by `loss_scale`, if there is one.
pub(super) fn rescale(
    op: &'static str,
    params: &[Var],
    clip: Option<&Clip>,
    loss_scale: Option<&LossScale>,
) -> Result<()> {
    let gradients = Gradients::of(params)?;
    let scale = |storage: &Raw| scale_gradients(op, storage, clip, loss_scale);
    gradients.vectors.iter().try_for_each(scale)?;
    gradients.unbound.iter().try_for_each(|var| var.change_grad(scale))
}

/// Computes the norm of the gradients of `params`, which are on the CPU.
pub(super) fn host_norm(params: &[Var], norm_type: NormType) -> Result<f64> {
    // For L2 this is the sum of squares, until the root is taken at the end.
    let mut norm = 0f64;
    for grad in params.iter().filter_map(Var::grad_storage) {
        let part = reduce(&grad, norm_type)?;
        norm = match norm_type {
            NormType::L2 => norm + part,
            NormType::Inf => larger(norm, part),
        };
    }
    Ok(if norm_type == NormType::L2 { norm.sqrt() } else { norm })
}

/// Scales the gradients of `params` by `max_norm / (norm + 1e-6)` if this factor is less than 1. Returns the norm
/// before scaling as a tensor, as [`grad_norm`] does. The host waits for a CUDA device only if `error_if_nonfinite` is
/// set.
///
/// Unless `error_if_nonfinite` is set, an infinite norm makes finite gradients zero, and a NaN norm makes all gradients
/// NaN, as in torch.
///
/// # Errors
/// [`Error::Argument`] if `max_norm` is negative or NaN; [`Error::NonFinite`] if `error_if_nonfinite` is set and the
/// norm is non-finite, in which case the gradients do not change; [`Error::Device`] as [`grad_norm`].
pub fn clip_grad_norm_(params: &[Var], max_norm: f64, norm_type: NormType, error_if_nonfinite: bool) -> Result<Tensor> {
    if max_norm.is_nan() || max_norm < 0.0 {
        return Err(Error::argument(
            CLIP_GRAD_NORM,
            format!("found max_norm {max_norm}, expected a number of at least 0"),
        ));
    }
    if let Some(device) = cuda_device(params) {
        let clip = clip(CLIP_GRAD_NORM, params, &device, max_norm, norm_type)?;
        let norm = Tensor::from_raw(&clip.norm()?);
        if error_if_nonfinite {
            check_finite(norm.item()?)?;
        }
        let loss_scale = None;
        rescale(CLIP_GRAD_NORM, params, Some(&clip), loss_scale)?;
        return Ok(norm);
    }
    let norm = host_norm(params, norm_type)?;
    if error_if_nonfinite {
        check_finite(norm)?;
    }
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 || factor.is_nan() {
        for var in params {
            var.scale_grad(factor)?;
        }
    }
    Tensor::new(norm, &Device::Cpu)
}

fn check_finite(norm: f64) -> Result<()> {
    if norm.is_finite() {
        return Ok(());
    }
    let message = format!("the norm of the gradients is {norm}; lower the learning rate or skip this step");
    Err(Error::NonFinite { op: CLIP_GRAD_NORM, message })
}

/// Reduces one gradient to its sum of squares or its largest magnitude.
fn reduce(grad: &Raw, norm_type: NormType) -> Result<f64> {
    let grad = if grad.is_contiguous() { grad.clone() } else { own_copy(grad)? };
    let (storage, layout) = grad.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        return Err(Error::device(GRAD_NORM, "a gradient is not on the CPU"));
    };
    dispatch_float!(grad.dtype(), GRAD_NORM, T => {
        let data = candle_core::WithDType::cpu_storage_as_slice(storage)?;
        let data = &data[layout.start_offset()..][..grad.elem_count()];
        Ok(reduce_slice::<T>(data, norm_type))
    })
}

/// Reduces the elements of a gradient as [`reduce`] does.
fn reduce_slice<T: Elem>(data: &[T], norm_type: NormType) -> f64 {
    // Each chunk with its sum or maximum, which a thread writes. A task gets a slice of one such pair.
    let mut chunks: Vec<(&[T], f64)> = data.chunks(CHUNK).map(|chunk| (chunk, 0.0)).collect();
    par_chunks_mut(&mut chunks, 1, |_, task| {
        let (chunk, part) = &mut task[0];
        *part = dispatch(
            #[inline(always)]
            || match norm_type {
                NormType::L2 => sum_of_squares(chunk),
                NormType::Inf => largest(chunk),
            },
        );
    });
    let parts = chunks.iter().map(|(_, part)| *part);
    match norm_type {
        NormType::L2 => parts.sum(),
        NormType::Inf => parts.fold(0.0, larger),
    }
}

/// The number of partial sums or maxima in a loop. Because they are separate, the compiler can vectorize the loop.
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

/// Returns the larger of two numbers, or NaN if one of them is NaN.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}
