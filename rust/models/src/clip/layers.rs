//! One layer of a text encoder.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::attention::scaled_dot_product_attention;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{LayerNorm, Linear, Module, Visitor, Weights};

use super::{Activation, CLIPTextConfig};
use crate::layers::split_heads;

/// Causal attention and a feed-forward network; each of the normalised input, added to it.
pub(super) struct EncoderLayer {
    layer_norm1: LayerNorm,
    q_proj: Linear<Tensor>,
    k_proj: Linear<Tensor>,
    v_proj: Linear<Tensor>,
    out_proj: Linear<Tensor>,
    heads: usize,
    layer_norm2: LayerNorm,
    fc1: Linear<Tensor>,
    fc2: Linear<Tensor>,
    activation: Activation,
}

impl EncoderLayer {
    pub(super) fn new(config: &CLIPTextConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, middle, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        Ok(Self {
            layer_norm1: weights.layer_norm("layer_norm1", dim, eps)?,
            q_proj: weights.linear("self_attn.q_proj", dim, dim, true)?,
            k_proj: weights.linear("self_attn.k_proj", dim, dim, true)?,
            v_proj: weights.linear("self_attn.v_proj", dim, dim, true)?,
            out_proj: weights.linear("self_attn.out_proj", dim, dim, true)?,
            heads: config.num_attention_heads,
            layer_norm2: weights.layer_norm("layer_norm2", dim, eps)?,
            fc1: weights.linear("mlp.fc1", dim, middle, true)?,
            fc2: weights.linear("mlp.fc2", middle, dim, true)?,
            activation: config.hidden_act,
        })
    }

    /// `x (B, S, D)` → the same shape.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.layer_norm1.forward(x)?;
        let (q, k, v) = (
            split_heads(&self.q_proj.forward(&normed)?, self.heads)?,
            split_heads(&self.k_proj.forward(&normed)?, self.heads)?,
            split_heads(&self.v_proj.forward(&normed)?, self.heads)?,
        );
        let mixed = scaled_dot_product_attention(&q, &k, &v, None, true, None)?;
        let x = x.add(&self.out_proj.forward(&mixed.transpose(1, 2)?.reshape(x.dims())?)?)?;
        let hidden = self.fc1.forward(&self.layer_norm2.forward(&x)?)?;
        let hidden = match self.activation {
            Activation::QuickGelu => hidden.quick_gelu(),
            Activation::Gelu => hidden.gelu(Gelu::Exact),
        }?;
        x.add(&self.fc2.forward(&hidden)?)
    }
}

impl Module for EncoderLayer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("self_attn.q_proj", &self.q_proj)?;
        visitor.linear("self_attn.k_proj", &self.k_proj)?;
        visitor.linear("self_attn.v_proj", &self.v_proj)?;
        visitor.linear("self_attn.out_proj", &self.out_proj)?;
        visitor.module("layer_norm1", &self.layer_norm1)?;
        visitor.linear("mlp.fc1", &self.fc1)?;
        visitor.linear("mlp.fc2", &self.fc2)?;
        visitor.module("layer_norm2", &self.layer_norm2)
    }
}
