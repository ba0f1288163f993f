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
    /// `to_q`, `to_k` and `to_v`.
    Own(LinearGroup),
    Context {
        to_q: Linear<Tensor>,
        /// `to_k` and `to_v`.
        others: LinearGroup,
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
                Projections::Own(weights.linear_group(&layers, dim, qkv_bias, init)?)
            }
            Some(context_dim) => Projections::Context {
                to_q: weights.linear_init("to_q", dim, dim, qkv_bias, init)?,
                others: weights.linear_group(&[("to_k", dim), ("to_v", dim)], context_dim, qkv_bias, init)?,
            },
        };
        Ok(Self { projections, to_out: weights.linear_init("to_out.0", dim, dim, true, init)?, heads })
    }

    /// The layer's result for the tokens `x (B, S, D)`, in the same shape. `x` attends to itself or, in an attention
    /// with a context, to `context (B, L, E)`.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if an input does not fit, [`Error::Argument`] if the layer needs a
    /// context and `context` is None, or the reverse.
    pub fn forward(&self, x: &Tensor, context: Option<&Tensor>) -> Result<Tensor> {
        let mixed = match (&self.projections, context) {
            (Projections::Own(group), None) => attend(&group.forward(x)?, self.heads, false)?,
            (Projections::Context { to_q, others }, Some(context)) => {
                let q = to_q.forward(x)?;
                match others.forward(context)? {
                    Projected::Joined(others) => packed_attention(&q, Some(&others), self.heads, false)?,
                    Projected::Separate(others) => {
                        attend_parts(&[&[q], others.as_slice()].concat(), self.heads, false)?
                    }
                }
            }
            (Projections::Own(_), Some(_)) => {
                return Err(Error::argument("Attention", "found a context, but this attention was made without one"));
            }
            (Projections::Context { .. }, None) => return Err(Error::argument("Attention", "the context is missing")),
        };
        self.to_out.forward(&mixed)
    }
}

impl Attention {
    /// Adds to `saved` what the tape keeps for `area` tokens that attend to one another, or to `context_area` tokens of
    /// a context. The backward pass of attention reads q, k, v and the attention's result.
    pub fn saved(&self, area: usize, context_area: Option<usize>, saved: &mut Saved) {
        let width = self.to_out.weight.dims()[0];
        let inside = area * width;
        saved.attention(area, context_area.unwrap_or(area), width);
        match &self.projections {
            Projections::Own(group) => saved.layers(&group.layers(), (inside, area), true),
            Projections::Context { to_q, others } => {
                saved.cheap_linear(to_q, (inside, area));
                // The context is an input of many layers and is in memory anyway, so it is not counted here.
                saved.layers(&others.layers(), (0, context_area.unwrap_or(area)), false);
            }
        }
        saved.keep(2 * inside + 2 * context_area.unwrap_or(area) * width);
        // If a gradient passes through attention, the tape keeps attention's result, which is also the input of
        // `to_out`, already.
        let input = if saved.is_reached() { 0 } else { inside };
        saved.linear(&self.to_out, (input, area));
    }
}

/// Attention over queries, keys and values, each (B, S, D): the results of a group of layers.
pub(crate) fn attend(projected: &Projected, heads: usize, is_causal: bool) -> Result<Tensor> {
    match projected {
        Projected::Joined(all) => packed_attention(all, None, heads, is_causal),
        Projected::Separate(parts) => attend_parts(parts, heads, is_causal),
    }
}

/// Attention over q, k and v, each (B, S, D).
fn attend_parts(parts: &[Tensor], heads: usize, is_causal: bool) -> Result<Tensor> {
    let [q, k, v] = parts else {
        return Err(Error::argument("Attention", format!("found {} projections, expected q, k and v", parts.len())));
    };
    let (q_heads, k, v) = (split_heads(q, heads)?, split_heads(k, heads)?, split_heads(v, heads)?);
    let mixed = scaled_dot_product_attention(&q_heads, &k, &v, None, is_causal, None)?;
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
            Projections::Own(group) => group.visit(visitor)?,
            Projections::Context { to_q, others } => {
                visitor.linear("to_q", to_q)?;
                others.visit(visitor)?;
            }
        }
        visitor.linear("to_out.0", &self.to_out)
    }
}
