//! Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762) with diffusers' names for its projections.

use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, Module, Visitor, Weights};

/// Attention of tokens to one another, or to those of a context. `to_q`, `to_k` and `to_v` share their input; with a context,
/// `to_k` and `to_v` do.
pub struct Attention {
    to_q: Linear<Tensor>,
    to_k: Linear<Tensor>,
    to_v: Linear<Tensor>,
    to_out: Linear<Tensor>,
    heads: usize,
}

/// The sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSizes {
    /// Number of heads, which share `dim` equally.
    pub heads: usize,
    /// Width of the tokens and of the projections.
    pub dim: usize,
    /// Width of the tokens that keys and values are made of.
    pub context_dim: usize,
    /// Whether `to_q`, `to_k` and `to_v` have biases; `to_out.0` has one.
    pub qkv_bias: bool,
}

impl Attention {
    /// Parameters below `weights`, starting by `init`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: AttentionSizes, init: Init, weights: &mut Weights<'_>) -> Result<Self> {
        let AttentionSizes { heads, dim, context_dim, qkv_bias } = sizes;
        Ok(Self {
            to_q: weights.linear_init("to_q", dim, dim, qkv_bias, init)?,
            to_k: weights.linear_init("to_k", context_dim, dim, qkv_bias, init)?,
            to_v: weights.linear_init("to_v", context_dim, dim, qkv_bias, init)?,
            to_out: weights.linear_init("to_out.0", dim, dim, true, init)?,
            heads,
        })
    }

    /// `x (B, S, D)` attends to itself, or to `context (B, L, E)` → the shape of `x`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] and its kin if an input does not fit.
    pub fn forward(&self, x: &Tensor, context: Option<&Tensor>) -> Result<Tensor> {
        let context = context.unwrap_or(x);
        let (q, k, v) = (
            split_heads(&self.to_q.forward(x)?, self.heads)?,
            split_heads(&self.to_k.forward(context)?, self.heads)?,
            split_heads(&self.to_v.forward(context)?, self.heads)?,
        );
        let mixed = scaled_dot_product_attention(&q, &k, &v, None, false, None)?;
        self.to_out.forward(&mixed.transpose(1, 2)?.reshape(x.dims())?)
    }
}

/// (B, S, D) → (B, heads, S, D / heads).
pub(crate) fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length) = (x.dims()[0], x.dims()[1]);
    x.reshape((batch, length, heads, x.dims()[2] / heads))?.transpose(1, 2)
}

impl Module for Attention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("to_q", &self.to_q)?;
        visitor.linear("to_k", &self.to_k)?;
        visitor.linear("to_v", &self.to_v)?;
        visitor.linear("to_out.0", &self.to_out)
    }
}
