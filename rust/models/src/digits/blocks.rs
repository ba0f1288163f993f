//! The blocks of the digits transformer, a diffusion transformer with adaLN-zero conditioning (arXiv:2212.09748,
//! section 3.2). In each block, one linear layer (`norm1.linear`) computes the shifts, scales and gates from the
//! condition. The layer's weight and bias start at zero. The gates of a fresh block are therefore zero, and the block
//! returns its input unchanged.

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::norm::modulated_layer_norm;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, Module, Visitor, Weights};

use super::DigitsConfig;
use crate::layers::{Attention, AttentionSizes};
use crate::saved::Saved;

/// Added to the variance in every layer norm of the model.
pub(super) const EPS: f64 = 1e-6;

/// A normal distribution with the standard deviation of Xavier's uniform distribution (Glorot & Bengio 2010),
/// √(2 / (in + out)).
pub(super) fn xavier(in_features: usize, out_features: usize) -> Init {
    Init::Normal((2.0 / (in_features + out_features) as f64).sqrt())
}

/// Attention, then a feed-forward network. The input of each is normalised and modulated; the output of each is
/// multiplied by a gate and added to the residual stream.
pub(super) struct Block {
    /// Computes the shifts, scales and gates.
    modulation: Linear<Tensor>,
    attn: Attention,
    ff_in: Linear<Tensor>,
    ff_out: Linear<Tensor>,
}

impl Block {
    /// Takes parameters below `weights`.
    pub(super) fn new(config: &DigitsConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = config.inner_dim();
        let hidden_dim = config.mlp_ratio * dim;
        let ff_init = xavier(dim, hidden_dim);
        let bias = true;
        Ok(Self {
            modulation: weights.linear_init("norm1.linear", dim, 6 * dim, bias, Init::Constant(0.0))?,
            attn: Attention::new(
                AttentionSizes { heads: config.num_attention_heads, dim, context_dim: None, qkv_bias: bias },
                xavier(dim, dim),
                &mut weights.pp("attn"),
            )?,
            ff_in: weights.linear_init("ff.net.0.proj", dim, hidden_dim, bias, ff_init)?,
            ff_out: weights.linear_init("ff.net.2", hidden_dim, dim, bias, ff_init)?,
        })
    }

    /// The block's result for the tokens `x (B, S, D)` and the condition `(B, D)`, to which the caller has applied
    /// SiLU. The result has the shape of `x`.
    pub(super) fn forward(&self, x: &Tensor, condition: &Tensor) -> Result<Tensor> {
        // (B, 6 D) in six chunks of (B, D).
        let modulation = self.modulation.forward(condition)?.chunk(6, 1)?;
        let [shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff] = &modulation[..] else {
            unreachable!("six chunks")
        };
        let attended =
            self.attn.forward(&modulated_layer_norm(x, scale_attn, shift_attn, EPS)?, /* context: */ None)?;
        let x = x.add(&attended.mul(&gate_attn.unsqueeze(1)?)?)?;
        let hidden = self.ff_in.forward(&modulated_layer_norm(&x, scale_ff, shift_ff, EPS)?)?.gelu(Gelu::Tanh)?;
        x.add(&self.ff_out.forward(&hidden)?.mul(&gate_ff.unsqueeze(1)?)?)
    }
}

impl Block {
    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub(super) fn saved(&self, tokens: usize, saved: &mut Saved) {
        let (dim, hidden_dim) = (self.ff_out.out_features(), self.ff_out.in_features());
        let (inputs, hidden) = (tokens * dim, tokens * hidden_dim);
        // Full checkpointing recomputes this block alone, not together with the previous block.
        let joins_previous = false;
        // `keep` counts the input of each of the two norms and of the GELU. Pairs are the number of a layer's input
        // values and the number of tokens; `cheap_linear` is for inputs that selective checkpointing recomputes.
        saved.block(inputs, joins_previous, |saved| {
            saved.linear(&self.modulation, (dim, 1));
            saved.keep(inputs);
            let context_tokens = None;
            self.attn.saved(tokens, context_tokens, saved);
            saved.keep(inputs);
            saved.cheap_linear(&self.ff_in, (inputs, tokens));
            saved.keep(hidden);
            saved.cheap_linear(&self.ff_out, (hidden, tokens));
        });
    }
}

impl Module for Block {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("norm1.linear", &self.modulation)?;
        visitor.module("attn", &self.attn)?;
        visitor.linear("ff.net.0.proj", &self.ff_in)?;
        visitor.linear("ff.net.2", &self.ff_out)
    }
}
