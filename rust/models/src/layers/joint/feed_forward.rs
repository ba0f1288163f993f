//! The feed-forward network of a transformer block, for image or text tokens.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Linear, Module, Visitor, Weights};

use super::BlockSizes;
use crate::saved::Saved;

/// The activation between the two linear layers, the layers' names, and the width of the hidden layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// GELU (its tanh form) between `net.0.proj` and `net.2`. The hidden layer is four times as wide as the tokens.
    #[default]
    Gelu,
    /// `SwiGLU` between `linear_in` and `linear_out`. The first half of the results of `linear_in` is the gate. The
    /// hidden layer is three times as wide as the tokens.
    SwiGlu,
}

impl FeedForwardKind {
    /// The names of the first and the last linear layer.
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Gelu => ["net.0.proj", "net.2"],
            Self::SwiGlu => ["linear_in", "linear_out"],
        }
    }

    /// Width of the hidden layer, as a multiple of the tokens' width.
    const fn ratio(self) -> usize {
        match self {
            Self::Gelu => 4,
            Self::SwiGlu => 3,
        }
    }

    /// The number of outputs of the first linear layer for each feature of the hidden layer.
    const fn outputs_per_feature(self) -> usize {
        match self {
            Self::Gelu => 1,
            Self::SwiGlu => 2,
        }
    }
}

/// Two linear layers with an activation between them.
pub struct FeedForward {
    kind: FeedForwardKind,
    first: Linear<Tensor>,
    last: Linear<Tensor>,
}

impl FeedForward {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, kind: FeedForwardKind, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, [first, last]) = (sizes.dim(), kind.names());
        let hidden_dim = kind.ratio() * dim;
        Ok(Self {
            kind,
            first: weights.linear(first, dim, kind.outputs_per_feature() * hidden_dim, sizes.bias)?,
            last: weights.linear(last, hidden_dim, dim, sizes.bias)?,
        })
    }

    /// The network's result for the tokens `x (batch, tokens, width)`, in the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let projected = self.first.forward(x)?;
        self.last.forward(&match self.kind {
            FeedForwardKind::Gelu => projected.gelu(Gelu::Tanh)?,
            // Gate and features are all columns of `projected`, from column 0 on. `None`: no other tensor is joined to
            // the result.
            FeedForwardKind::SwiGlu => activate_beside(None, &projected, 0, Activation::SwiGlu)?,
        })
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        // The pair after each layer has the number of input values of all tokens together, and the number of tokens.
        // The layers are `cheap` because their inputs come from a norm and from the activation, which are cheap to
        // recompute.
        saved.cheap_linear(&self.first, (tokens * self.first.in_features(), tokens));
        // The activation keeps its input, the result of `first`.
        saved.keep(tokens * self.first.out_features());
        saved.cheap_linear(&self.last, (tokens * self.last.in_features(), tokens));
    }
}

impl Module for FeedForward {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        let [first, last] = self.kind.names();
        visitor.linear(first, &self.first)?;
        visitor.linear(last, &self.last)
    }
}
