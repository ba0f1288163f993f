//! Norm layers over frozen or trainable parameters.

use trainable_candle_core::ops::norm::{layer_norm, rms_norm};
use trainable_candle_core::{Result, Tensor};

/// Layer normalisation of the last dimension (Ba et al. 2016, arXiv:1607.06450).
pub struct LayerNorm {
    /// Scale, (features).
    pub weight: Option<Tensor>,
    /// Shift, (features).
    pub bias: Option<Tensor>,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// `x (..., features)` → the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the input does not fit the parameters.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, 1, self.weight.as_ref(), self.bias.as_ref(), self.eps)
    }
}

/// Root-mean-square normalisation of the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).
pub struct RmsNorm {
    /// Scale, (features).
    pub weight: Option<Tensor>,
    /// Added to the mean square.
    pub eps: f64,
}

impl RmsNorm {
    /// `x (..., features)` → the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the input does not fit the parameters.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, self.weight.as_ref(), self.eps)
    }
}
