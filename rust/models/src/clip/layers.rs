//! One layer of a CLIP text encoder.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, LayerNorm, Linear, LinearGroup, Module, Visitor, Weights};

use super::{Activation, CLIPTextConfig};
use crate::layers::attend;
use crate::saved::Saved;

/// The names of the query, key and value projections.
const PROJECTIONS: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];

/// A pre-norm encoder layer with causal attention: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
pub(super) struct EncoderLayer {
    layer_norm1: LayerNorm,
    /// `q_proj`, `k_proj` and `v_proj`.
    projections: LinearGroup,
    /// The output projection of attention.
    out_proj: Linear<Tensor>,
    /// The number of heads of attention.
    heads: usize,
    layer_norm2: LayerNorm,
    fc1: Linear<Tensor>,
    fc2: Linear<Tensor>,
    activation: Activation,
}

impl EncoderLayer {
    /// A layer with the parameters below `weights`.
    pub(super) fn new(config: &CLIPTextConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, wide, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let has_bias = true;
        Ok(Self {
            layer_norm1: weights.layer_norm("layer_norm1", dim, eps)?,
            projections: weights.linear_group(&PROJECTIONS.map(|name| (name, dim)), dim, has_bias, Init::Kaiming)?,
            out_proj: weights.linear("self_attn.out_proj", dim, dim, has_bias)?,
            heads: config.num_attention_heads,
            layer_norm2: weights.layer_norm("layer_norm2", dim, eps)?,
            fc1: weights.linear("mlp.fc1", dim, wide, has_bias)?,
            fc2: weights.linear("mlp.fc2", wide, dim, has_bias)?,
            activation: config.hidden_act,
        })
    }

    /// The layer's result (B, S, D) for the hidden states `x (B, S, D)` of B texts of S tokens, with D = `hidden_size`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.layer_norm1.forward(x)?;
        let is_causal = true;
        let mixed = attend(&self.projections.forward(&normed)?, self.heads, is_causal)?;
        let (x, normed) = self.layer_norm2.add_forward(x, &self.out_proj.forward(&mixed)?)?;
        let hidden = self.fc1.forward(&normed)?;
        let hidden = match self.activation {
            Activation::QuickGelu => hidden.quick_gelu(),
            Activation::Gelu => hidden.gelu(Gelu::Exact),
        }?;
        x.add(&self.fc2.forward(&hidden)?)
    }

    /// Adds to `saved` what the tape keeps of a forward pass over one text of `tokens` tokens.
    pub(super) fn saved(&self, tokens: usize, saved: &mut Saved) {
        let &[dim, wide] = self.fc2.weight.dims() else { return };
        // Numbers of values: of the hidden states, and between the two linear layers of the feed-forward network.
        let (states, between) = (tokens * dim, tokens * wide);
        // In the calls below, a pair has the number of values of a linear layer's input and the number of tokens.
        // `block` gets the number of values of the layer's input. Under full checkpointing, the backward pass
        // recomputes the layer alone, not together with the previous one.
        let joins_previous = false;
        saved.block(states, joins_previous, |saved| {
            // The input of the first norm.
            saved.keep(states);
            // The projections' input is the result of a norm, which is cheap to recompute.
            let cheap = true;
            saved.layers(&self.projections.layers(), (states, tokens), cheap);
            // Counts the operations of attention from all tokens to all tokens, and no values.
            saved.attention(tokens, tokens, dim);
            // Attention keeps queries, keys, values and its result.
            saved.keep(4 * states);
            saved.linear(&self.out_proj, (states, tokens));
            // The input of the second norm.
            saved.keep(states);
            // The inputs of `fc1` and `fc2` are results of a norm and of the activation, which are cheap to recompute.
            saved.cheap_linear(&self.fc1, (states, tokens));
            // The input of the activation.
            saved.keep(between);
            saved.cheap_linear(&self.fc2, (between, tokens));
        });
    }
}

impl Module for EncoderLayer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.projections.visit(visitor)?;
        visitor.linear("self_attn.out_proj", &self.out_proj)?;
        visitor.module("layer_norm1", &self.layer_norm1)?;
        visitor.linear("mlp.fc1", &self.fc1)?;
        visitor.linear("mlp.fc2", &self.fc2)?;
        visitor.module("layer_norm2", &self.layer_norm2)
    }
}
