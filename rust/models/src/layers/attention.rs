//! Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762) with diffusers' names for its projections.

use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, Module, Visitor, Weights};

/// Attention of tokens to one another. `to_q`, `to_k` and `to_v` share their input.
pub struct Attention {
    to_q: Linear<Tensor>,
    to_k: Linear<Tensor>,
    to_v: Linear<Tensor>,
    to_out: Linear<Tensor>,
    heads: usize,
}

impl Attention {
    /// Parameters below `weights`; width `heads * head_dim`, with biases, starting by `init`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(heads: usize, head_dim: usize, init: Init, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = heads * head_dim;
        Ok(Self {
            to_q: weights.linear_init("to_q", dim, dim, true, init)?,
            to_k: weights.linear_init("to_k", dim, dim, true, init)?,
            to_v: weights.linear_init("to_v", dim, dim, true, init)?,
            to_out: weights.linear_init("to_out.0", dim, dim, true, init)?,
            heads,
        })
    }

    /// `x (B, S, D)` → the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] and its kin if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (q, k, v) = (
            self.split(&self.to_q.forward(x)?)?,
            self.split(&self.to_k.forward(x)?)?,
            self.split(&self.to_v.forward(x)?)?,
        );
        let mixed = scaled_dot_product_attention(&q, &k, &v, None, false, None)?;
        self.to_out.forward(&mixed.transpose(1, 2)?.reshape(x.dims())?)
    }

    /// (B, S, D) → (B, heads, S, D / heads).
    fn split(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length) = (x.dims()[0], x.dims()[1]);
        x.reshape((batch, length, self.heads, x.dims()[2] / self.heads))?.transpose(1, 2)
    }
}

impl Module for Attention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("to_q", &self.to_q)?;
        visitor.linear("to_k", &self.to_k)?;
        visitor.linear("to_v", &self.to_v)?;
        visitor.linear("to_out.0", &self.to_out)
    }
}
