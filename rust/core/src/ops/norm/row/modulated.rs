//! Layer norm with a computed scale and shift for each sample: adaLN of diffusion transformers (Peebles & Xie 2022,
//! arXiv:2212.09748, section 3.2).

use super::{Affine, Kind, RowNorm, Size, check_eps};
use crate::tape::OpInfo;
use crate::{Error, Result, Tensor};

pub(in crate::ops::norm) static MODULATED_LAYER_NORM: OpInfo = OpInfo::cheap("modulated_layer_norm");

/// (x - mean) / √(var + eps) · (1 + scale) + shift over the last dimension, with the biased variance:
/// `x (batch, ..., features)`, `scale` and `shift (batch, features)`. `scale` and `shift` have the dtype of `x`; for a
/// 16-bit `x` they may be f32. The statistics are f32, or f64 for an f64 `x`.
///
/// # Errors
/// [`Error::Argument`] if `eps` is negative or not finite; [`Error::Shape`] if `x` has fewer than two dimensions;
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if `scale` or `shift` does not match `x`; on CUDA also
/// [`Error::Argument`] for more than 65535 samples.
pub fn modulated_layer_norm(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f64) -> Result<Tensor> {
    let op = MODULATED_LAYER_NORM.name;
    check_eps(op, eps)?;
    let &[batch, ref positions @ .., len] = x.dims() else {
        return Err(Error::shape(op, format!("the input has shape {:?}, expected (batch, ..., features)", x.dims())));
    };
    let size = Size { samples: batch, sample_rows: positions.iter().product(), len };
    let affine = Affine::named(op, x, [("scale", Some(scale)), ("shift", Some(shift))], &[batch, len])?;
    // `None`: the norm of x has not been computed yet.
    RowNorm { op, kind: Kind::Modulated, size, affine, eps }.record(&MODULATED_LAYER_NORM, x, None)
}
