//! The last layer: a modulated norm and a projection.

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::{Linear, Module, Visitor, Weights};

use super::modulation::modulated;
use crate::saved::Saved;

/// Norm, scale and shift that the condition gives, projection to the values of the patches.
pub struct ModulatedOutput {
    norm: Linear<Tensor>,
    projection: Linear<Tensor>,
}

impl ModulatedOutput {
    /// Parameters `norm_out.linear` and `proj_out` of `weights`, from tokens `dim` wide to `out` values; with biases or without.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new([dim, out]: [usize; 2], bias: bool, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            norm: weights.linear("norm_out.linear", dim, 2 * dim, bias)?,
            projection: weights.linear("proj_out", dim, out, bias)?,
        })
    }

    /// `x (B, S, D)` under the condition `(B, D)`, after SiLU → (B, S, out).
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        let said = self.norm.forward(condition)?;
        let dim = self.norm.in_features();
        // diffusers says the scale first here.
        let (scale, shift) = (said.narrow(1, 0, dim)?, said.narrow(1, dim, dim)?);
        self.projection.forward(&modulated(x, [&shift, &scale])?)
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.projection.weight.dtype()
    }

    /// What the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let dim = self.norm.in_features();
        saved.outside(|saved| {
            saved.linear(&self.norm, (dim, 1));
            saved.keep(tokens * dim);
            saved.linear(&self.projection, (tokens * dim, tokens));
        });
    }
}

impl Module for ModulatedOutput {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("norm_out.linear", &self.norm)?;
        visitor.linear("proj_out", &self.projection)
    }
}
