//! The feed-forward layer of a block.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Linear, Module, Visitor, Weights};

use crate::saved::Saved;

/// Width of the middle, as a multiple of the tokens'.
const RATIO: usize = 4;

/// Two linear layers with GELU (its tanh form) between them.
pub struct FeedForward {
    first: Linear<Tensor>,
    last: Linear<Tensor>,
}

impl FeedForward {
    /// Parameters below `weights`, for tokens `dim` wide.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(dim: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            first: weights.linear("net.0.proj", dim, RATIO * dim, true)?,
            last: weights.linear("net.2", RATIO * dim, dim, true)?,
        })
    }

    /// `x (B, S, D)` → the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.last.forward(&self.first.forward(x)?.gelu(Gelu::Tanh)?)
    }

    /// What the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let middle = tokens * self.first.out_features();
        saved.cheap_linear(&self.first, (tokens * self.first.in_features(), tokens));
        saved.keep(middle);
        saved.cheap_linear(&self.last, (middle, tokens));
    }
}

impl Module for FeedForward {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("net.0.proj", &self.first)?;
        visitor.linear("net.2", &self.last)
    }
}
