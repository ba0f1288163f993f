//! A residual sum and its norm, as in blocks of transformers: x + residual, and layer norm or RMS norm of the sum.
//!
//! The sum and the norm are two nodes of the tape. On CUDA, one kernel computes both if x and the residual are dense.

use std::cell::Cell;

use super::{Kind, LAYER_NORM, Normalised, RMS_NORM, RowNorm};
use crate::compute::on_device;
use crate::cpu::Add;
use crate::ops::arithmetic::{add_by, check};
use crate::tape::OpInfo;
use crate::{Error, Result, Tensor, compute};

pub(in crate::ops::norm) static ADD_LAYER_NORM: OpInfo = OpInfo::cheap("add_layer_norm");
pub(in crate::ops::norm) static ADD_RMS_NORM: OpInfo = OpInfo::cheap("add_rms_norm");

/// Returns x + residual, rounded to the dtype of `x`, and [`layer_norm`](crate::ops::norm::layer_norm) of this rounded
/// sum.
///
/// `x` and `residual` have the same shape and dtype; the other arguments are those of the norm.
///
/// # Errors
/// As [`layer_norm`](crate::ops::norm::layer_norm); also [`Error::Shape`], [`Error::DType`], [`Error::Device`] if `x`
/// and `residual` differ in shape, dtype or device.
pub fn add_layer_norm(
    x: &Tensor,
    residual: &Tensor,
    normalized_dims: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let norm = RowNorm::new(ADD_LAYER_NORM.name, Kind::Layer, x, normalized_dims, [weight, bias], eps)?;
    add_norm(&ADD_LAYER_NORM, &LAYER_NORM, x, residual, &norm)
}

/// Returns x + residual, rounded to the dtype of `x`, and [`rms_norm`](crate::ops::norm::rms_norm) of this rounded sum.
///
/// `x` and `residual` have the same shape and dtype; the other arguments are those of the norm.
///
/// # Errors
/// As [`rms_norm`](crate::ops::norm::rms_norm); also [`Error::Shape`], [`Error::DType`], [`Error::Device`] if `x` and
/// `residual` differ in shape, dtype or device.
pub fn add_rms_norm(x: &Tensor, residual: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<(Tensor, Tensor)> {
    let normalized_dims = 1;
    let norm = RowNorm::new(ADD_RMS_NORM.name, Kind::Rms, x, normalized_dims, [weight, None], eps)?;
    add_norm(&ADD_RMS_NORM, &RMS_NORM, x, residual, &norm)
}

/// Computes the sum and its norm. `info` names the operation in errors; `norm_info` describes the norm's node of the
/// tape.
fn add_norm(
    info: &'static OpInfo,
    norm_info: &'static OpInfo,
    x: &Tensor,
    residual: &Tensor,
    norm: &RowNorm<'_>,
) -> Result<(Tensor, Tensor)> {
    let op = info.name;
    if x.dims() != residual.dims() {
        return Err(Error::shape(
            op,
            format!("x has shape {:?}, the residual {:?}; expected the same shape", x.dims(), residual.dims()),
        ));
    }
    check(op, x, residual)?; // the same dtype and device
    // The norm and its statistics, if the kernel that computes the sum has computed them too.
    let fused_norm = Cell::new(None::<Normalised>);
    let sum = add_by(x, residual, || {
        let fused =
            on_device!(x.device(), cuda => super::cuda::sum_and_norm(norm, [&x.raw, &residual.raw])?, cpu => None);
        if let Some((sum, normalised)) = fused {
            fused_norm.set(Some(normalised));
            return Ok(sum);
        }
        compute::binary(&x.raw, &residual.raw, Add).map_err(|error| error.under(op))
    })?;
    let y = norm.record(norm_info, &sum, fused_norm.take())?;
    Ok((sum, y))
}
