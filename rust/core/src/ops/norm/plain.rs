//! The plain forms of norms, and the frozen inputs of their test cases.

use crate::{Result, Tensor};

pub(super) fn layer_norm(x: &[Tensor], dims: &[usize], eps: f64) -> Result<Tensor> {
    let centered = x[0].sub(&x[0].mean(dims, true)?)?;
    let std = centered.sqr()?.mean(dims, true)?.add_scalar(eps)?.sqrt()?;
    affine(&centered.div(&std)?, x)
}

pub(super) fn rms_norm(x: &[Tensor], eps: f64) -> Result<Tensor> {
    let rms = x[0].sqr()?.mean(&[x[0].rank() - 1], true)?.add_scalar(eps)?.sqrt()?;
    affine(&x[0].div(&rms)?, x)
}

/// The plain form of group norm for `x[0] (batch, length, channels)`.
pub(super) fn group_norm(x: &[Tensor], groups: usize, eps: f64) -> Result<Tensor> {
    let dims = x[0].dims();
    let split = x[0].reshape((dims[0], dims[1], groups, dims[2] / groups))?;
    let normal = layer_norm(&[split], &[1, 3], eps)?.reshape(x[0].shape().clone())?;
    affine(&normal, x)
}

/// `normal` times the scale `x[1]`, plus the shift `x[2]`. Both may be missing, or the shift alone.
pub(super) fn affine(normal: &Tensor, x: &[Tensor]) -> Result<Tensor> {
    let scaled = x.get(1).map_or_else(|| Ok(normal.clone()), |weight| normal.mul(weight))?;
    x.get(2).map_or_else(|| Ok(scaled.clone()), |bias| scaled.add(bias))
}

/// An input that needs no gradient, of the dtype and on the device of `like`.
pub(super) fn frozen(dims: &[usize], like: &Tensor) -> Result<Tensor> {
    let values = (0..dims.iter().product()).map(|i: usize| (i as f64 * 1.3).sin()).collect::<Vec<_>>();
    Tensor::from_vec(values, dims, like.device())?.to_dtype(like.dtype())
}
