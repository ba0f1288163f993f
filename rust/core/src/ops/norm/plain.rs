//! The plain forms of norms: their definitions in basic operations, with which tests compare the fused operations. Also
//! makes frozen inputs for these tests.
//!
//! Each plain form gets the inputs `x` of a test case: the tensor to normalise `x[0]`, the scale `x[1]` and the shift
//! `x[2]`. The shift may be missing, or the scale and the shift.

use crate::{Result, Tensor};

/// The plain form of layer norm over the dimensions `dims`.
pub(super) fn layer_norm(x: &[Tensor], dims: &[usize], eps: f64) -> Result<Tensor> {
    let centered = x[0].sub(&x[0].mean(dims, true)?)?;
    let std = centered.sqr()?.mean(dims, true)?.add_scalar(eps)?.sqrt()?;
    affine(&centered.div(&std)?, x)
}

/// The plain form of RMS norm over the last dimension.
pub(super) fn rms_norm(x: &[Tensor], eps: f64) -> Result<Tensor> {
    let rms = x[0].sqr()?.mean(&[x[0].rank() - 1], true)?.add_scalar(eps)?.sqrt()?;
    affine(&x[0].div(&rms)?, x)
}

/// The plain form of group norm for `x[0] (batch, length, channels)`.
pub(super) fn group_norm(x: &[Tensor], groups: usize, eps: f64) -> Result<Tensor> {
    let dims = x[0].dims();
    let split = x[0].reshape((dims[0], dims[1], groups, dims[2] / groups))?;
    // Only `split` is given, so `layer_norm` applies neither scale nor shift.
    let normalised = layer_norm(&[split], &[1, 3], eps)?.reshape(x[0].shape().clone())?;
    affine(&normalised, x)
}

/// Returns `normalised` times the scale `x[1]`, plus the shift `x[2]`. The shift may be missing, or the scale and the
/// shift.
pub(super) fn affine(normalised: &Tensor, x: &[Tensor]) -> Result<Tensor> {
    let scaled = x.get(1).map_or_else(|| Ok(normalised.clone()), |scale| normalised.mul(scale))?;
    x.get(2).map_or_else(|| Ok(scaled.clone()), |shift| scaled.add(shift))
}

/// Returns a tensor of fixed values that needs no gradient, in the dtype and on the device of `like`.
pub(super) fn frozen(dims: &[usize], like: &Tensor) -> Result<Tensor> {
    let values = (0..dims.iter().product()).map(|i: usize| (i as f64 * 1.3).sin()).collect::<Vec<_>>();
    Tensor::from_vec(values, dims, like.device())?.to_dtype(like.dtype())
}
