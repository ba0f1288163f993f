//! Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762) with diffusers' names for its projections.

use trainable_candle_core::ops::attention::{packed_attention, scaled_dot_product_attention};
use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, Visitor, Weights};

use crate::saved::Saved;

/// Attention of tokens to one another, or to the tokens of a context. Without a context, `to_q`, `to_k` and `to_v` read
/// the same input; with a context, `to_k` and `to_v` read the context.
pub struct Attention {
    projections: Projections,
    to_out: Linear<Tensor>,
    heads: usize,
}

enum Projections {
    /// Without a context: `to_q`, `to_k` and `to_v`.
    SelfAttention(LinearGroup),
    /// With a context.
    Context {
        to_q: Linear<Tensor>,
        /// `to_k` and `to_v`.
        to_kv: LinearGroup,
    },
}

/// The sizes of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSizes {
    /// Number of heads, a divisor of `dim`.
    pub heads: usize,
    /// Width of the tokens and of the projections.
    pub dim: usize,
    /// Width of the context's tokens, if keys and values are computed from a context.
    pub context_dim: Option<usize>,
    /// Whether `to_q`, `to_k` and `to_v` have biases; `to_out.0` always has one.
    pub qkv_bias: bool,
}

impl Attention {
    /// Takes parameters below `weights`. Fresh weights are drawn from `init`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: AttentionSizes, init: Init, weights: &mut Weights<'_>) -> Result<Self> {
        let AttentionSizes { heads, dim, context_dim, qkv_bias } = sizes;
        let projections = match context_dim {
            None => {
                let layers = [("to_q", dim), ("to_k", dim), ("to_v", dim)];
                Projections::SelfAttention(weights.linear_group(&layers, dim, qkv_bias, init)?)
            }
            Some(context_dim) => Projections::Context {
                to_q: weights.linear_init("to_q", dim, dim, qkv_bias, init)?,
                to_kv: weights.linear_group(&[("to_k", dim), ("to_v", dim)], context_dim, qkv_bias, init)?,
            },
        };
        Ok(Self { projections, to_out: weights.linear_init("to_out.0", dim, dim, /* bias */ true, init)?, heads })
    }

    /// The layer's result for the tokens `x (B, S, D)`, in the same shape. The tokens attend to one another or, in an
    /// attention with a context, to `context (B, L, E)`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`] or [`Error::Device`] if an input does not fit; [`Error::Argument`] if the
    /// layer needs a context and `context` is None, or if `context` is given to a layer without a context.
    pub fn forward(&self, x: &Tensor, context: Option<&Tensor>) -> Result<Tensor> {
        let is_causal = false;
        let mixed = match (&self.projections, context) {
            (Projections::SelfAttention(group), None) => attend(&group.forward(x)?, self.heads, is_causal)?,
            (Projections::Context { to_q, to_kv }, Some(context)) => {
                let q = to_q.forward(x)?;
                match to_kv.forward(context)? {
                    Projected::Joined(kv) => packed_attention(&q, Some(&kv), self.heads, is_causal)?,
                    Projected::Separate(kv) => attend_parts(&[&[q], kv.as_slice()].concat(), self.heads, is_causal)?,
                }
            }
            (Projections::SelfAttention(_), Some(_)) => {
                return Err(Error::argument("Attention", "found a context, but this attention was made without one"));
            }
            (Projections::Context { .. }, None) => return Err(Error::argument("Attention", "the context is missing")),
        };
        self.to_out.forward(&mixed)
    }
}

impl Attention {
    /// Adds to `saved` what the tape keeps for `tokens` tokens that attend to one another or, if the layer has a
    /// context, to `context_tokens` tokens.
    pub fn saved(&self, tokens: usize, context_tokens: Option<usize>, saved: &mut Saved) {
        let dim = self.to_out.weight.dims()[0];
        // The number of values of the input `x` of the layer, (tokens, dim).
        let inputs = tokens * dim;
        let keys = context_tokens.unwrap_or(tokens);
        // This counts the operations of attention, but no values that the tape keeps.
        saved.attention(tokens, keys, dim);
        match &self.projections {
            Projections::SelfAttention(group) => {
                // The input is the result of a norm, which is cheap to recompute.
                let cheap = true;
                saved.layers(&group.layers(), (inputs, tokens), cheap);
            }
            Projections::Context { to_q, to_kv } => {
                saved.cheap_linear(to_q, (inputs, tokens));
                // The context is an input of many layers and is in memory anyway, so its values are not counted here.
                let (context_values, cheap) = (0, false);
                saved.layers(&to_kv.layers(), (context_values, keys), cheap);
            }
        }
        // The backward pass of attention reads q and the result (a row for each token), and k and v (a row for each
        // key). `keep` counts them only if a gradient passes through attention (`is_reached`).
        saved.keep(2 * tokens * dim + 2 * keys * dim);
        // The result of attention is the input of `to_out`. If a gradient passes through attention, `keep` has counted
        // the result already.
        let input = if saved.is_reached() { 0 } else { tokens * dim };
        saved.linear(&self.to_out, (input, tokens));
    }
}

/// Attention over `projected`: queries, keys and values, each (B, S, D), which a group of layers has computed as one
/// tensor (B, S, 3 D) or as separate tensors.
pub(crate) fn attend(projected: &Projected, heads: usize, is_causal: bool) -> Result<Tensor> {
    match projected {
        Projected::Joined(qkv) => {
            let context = None;
            packed_attention(qkv, context, heads, is_causal)
        }
        Projected::Separate(parts) => attend_parts(parts, heads, is_causal),
    }
}

/// Attention over `parts`: q (B, S, D), and k and v (B, L, D) each.
fn attend_parts(parts: &[Tensor], heads: usize, is_causal: bool) -> Result<Tensor> {
    let [q, k, v] = parts else {
        return Err(Error::argument("Attention", format!("found {} projections, expected q, k and v", parts.len())));
    };
    let (q_heads, k_heads, v_heads) = (split_heads(q, heads)?, split_heads(k, heads)?, split_heads(v, heads)?);
    // The default scale is 1/√(D / heads).
    let (mask, scale) = (None, None);
    let mixed = scaled_dot_product_attention(&q_heads, &k_heads, &v_heads, mask, is_causal, scale)?;
    mixed.transpose(1, 2)?.reshape(q.dims())
}

/// Divides the features of each token into heads: (B, S, D) → (B, heads, S, D / heads).
fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, length) = (x.dims()[0], x.dims()[1]);
    x.reshape((batch, length, heads, x.dims()[2] / heads))?.transpose(1, 2)
}

impl Module for Attention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        match &self.projections {
            Projections::SelfAttention(group) => group.visit(visitor)?,
            Projections::Context { to_q, to_kv } => {
                visitor.linear("to_q", to_q)?;
                to_kv.visit(visitor)?;
            }
        }
        visitor.linear("to_out.0", &self.to_out)
    }
}
