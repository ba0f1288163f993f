//! Norm layers over frozen or trainable parameters.

use trainable_candle_core::ops::norm::{
    add_layer_norm, add_rms_norm, group_norm, group_norm_silu, layer_norm, rms_norm,
};
use trainable_candle_core::{Result, Tensor};

use crate::{Module, Visitor};

/// The number of dimensions, counted from the last, that [`LayerNorm`] normalises.
const NORMALIZED_DIMS: usize = 1;

/// Layer normalisation of the last dimension (Ba et al. 2016, arXiv:1607.06450).
pub struct LayerNorm {
    /// Scale, (features); None for a scale of 1.
    pub weight: Option<Tensor>,
    /// Shift, (features); None for a shift of 0.
    pub bias: Option<Tensor>,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// Normalise `x (..., features)`; the result has the same shape.
    ///
    /// # Errors
    /// As [`layer_norm`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, NORMALIZED_DIMS, self.weight.as_ref(), self.bias.as_ref(), self.eps)
    }

    /// Return x + residual and [`forward`](Self::forward) of this sum. `x`, `residual` and both results are
    /// (..., features).
    ///
    /// # Errors
    /// As [`add_layer_norm`].
    pub fn add_forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        add_layer_norm(x, residual, NORMALIZED_DIMS, self.weight.as_ref(), self.bias.as_ref(), self.eps)
    }
}

/// Root-mean-square normalisation of the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).
pub struct RmsNorm {
    /// Scale, (features); None for a scale of 1.
    pub weight: Option<Tensor>,
    /// Added to the mean square.
    pub eps: f64,
}

impl RmsNorm {
    /// Normalise `x (..., features)`; the result has the same shape.
    ///
    /// # Errors
    /// As [`rms_norm`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, self.weight.as_ref(), self.eps)
    }

    /// Return x + residual and [`forward`](Self::forward) of this sum. `x`, `residual` and both results are
    /// (..., features).
    ///
    /// # Errors
    /// As [`add_rms_norm`].
    pub fn add_forward(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        add_rms_norm(x, residual, self.weight.as_ref(), self.eps)
    }
}

/// Group normalisation of channels-last tensors (Wu & He 2018, arXiv:1803.08494).
pub struct GroupNorm {
    /// Scale, (channels).
    pub weight: Tensor,
    /// Shift, (channels).
    pub bias: Tensor,
    /// The number of groups of channels. Each group of each sample is normalised separately.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl GroupNorm {
    /// Normalise `x (batch, ..., channels)`; the result has the same shape.
    ///
    /// # Errors
    /// As [`group_norm`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        group_norm(x, self.groups, Some(&self.weight), Some(&self.bias), self.eps)
    }

    /// Return the SiLU of [`forward`](Self::forward), computed in one operation.
    ///
    /// # Errors
    /// As [`group_norm_silu`].
    pub fn forward_silu(&self, x: &Tensor) -> Result<Tensor> {
        group_norm_silu(x, self.groups, Some(&self.weight), Some(&self.bias), self.eps)
    }
}

impl Module for LayerNorm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        for (name, parameter) in [("weight", &self.weight), ("bias", &self.bias)] {
            if let Some(parameter) = parameter {
                visitor.tensor(name, parameter)?;
            }
        }
        Ok(())
    }
}

impl Module for RmsNorm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.weight.iter().try_for_each(|weight| visitor.tensor("weight", weight))
    }
}

impl Module for GroupNorm {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.tensor("weight", &self.weight)?;
        visitor.tensor("bias", &self.bias)
    }
}
