//! The single-stream block of FLUX.2. It has two fused layers, in the model as well as in files. The first layer
//! computes the queries, keys and values of attention, and the two inputs of the feed-forward network's `SwiGLU`. The
//! last layer projects the concatenated results of attention and of the `SwiGLU` (Dehghani et al. 2023,
//! arXiv:2302.05442, section 2.1).

use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Linear, Module, Projected, RmsNorm, Visitor, Weights};

use crate::layers::joint::{BlockSizes, Rope, Stream, gated_add, mix, modulated};
use crate::saved::Saved;

/// Width of the `SwiGLU`'s result, as a multiple of the tokens' width.
const RATIO: usize = 3;
/// Width of queries, keys and values together, as a multiple of the tokens' width.
const QKV: usize = 3;
/// Width of the first layer's result, as a multiple of the tokens' width: queries, keys, values, and the two inputs of
/// the `SwiGLU`.
const PROJECTED: usize = QKV + 2 * RATIO;

/// Attention and a `SwiGLU`, which read the same modulated input. The projection of their results is multiplied by a
/// gate and added to the residual stream.
pub(super) struct FusedBlock {
    to_qkv_mlp_proj: Linear<Tensor>,
    /// Norms of queries and keys, per head.
    norms: [RmsNorm; 2],
    to_out: Linear<Tensor>,
    sizes: BlockSizes,
}

impl FusedBlock {
    /// Takes parameters below `weights`.
    pub fn new(sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        let mut norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        Ok(Self {
            norms: [norm("attn.norm_q")?, norm("attn.norm_k")?],
            to_qkv_mlp_proj: weights.linear("attn.to_qkv_mlp_proj", dim, PROJECTED * dim, sizes.bias)?,
            to_out: weights.linear("attn.to_out", (1 + RATIO) * dim, dim, sizes.bias)?,
            sizes,
        })
    }

    /// The block's result for the tokens `x (B, S, D)`, in the same shape; `modulation (B, 3 D)` is shift, scale and
    /// gate.
    pub fn forward(&self, x: &Tensor, modulation: &Tensor, angles: &Rope) -> Result<Tensor> {
        let dim = self.sizes.dim();
        let part = |index: usize| modulation.narrow(1, index * dim, dim);
        let projected = self.to_qkv_mlp_proj.forward(&modulated(x, [&part(0)?, &part(1)?])?)?;
        let qkv = Projected::Joined(projected.clone());
        let stream = Stream { projected: qkv, norms: Some(&self.norms), angles: Some(angles.clone()) };
        let mask = None;
        let mixed = mix(&[stream], self.sizes, mask)?;
        // The result of attention, followed by the `SwiGLU` of the last columns of `projected`: (B, S, 4 D).
        let both = activate_beside(Some(&mixed), &projected, QKV * dim, Activation::SwiGlu)?;
        gated_add(x, &self.to_out.forward(&both)?, &part(2)?)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        // The number of values in the block's input, (tokens, D).
        let inputs = tokens * self.sizes.dim();
        let joins_previous = false; // full checkpointing recomputes this block alone
        saved.block(inputs, joins_previous, |saved| {
            // The layer norm in `modulated` keeps its input.
            saved.keep(inputs);
            // `cheap_linear`: selective checkpointing recomputes the layer's input (here the result of the norm, for
            // `to_out` the tensor `both` of `forward`). The pairs are the number of values in this input and the number
            // of tokens.
            saved.cheap_linear(&self.to_qkv_mlp_proj, (inputs, tokens));
            // Counts the operations of attention; each token has a query and a key.
            saved.attention(tokens, tokens, self.sizes.dim());
            // The tape keeps the results of `to_qkv_mlp_proj` (9 D per token) and of the attention (D per token).
            saved.keep((PROJECTED + 1) * inputs);
            saved.cheap_linear(&self.to_out, ((1 + RATIO) * inputs, tokens));
        });
    }
}

impl Module for FusedBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("attn.to_qkv_mlp_proj", &self.to_qkv_mlp_proj)?;
        visitor.module("attn.norm_q", &self.norms[0])?;
        visitor.module("attn.norm_k", &self.norms[1])?;
        visitor.linear("attn.to_out", &self.to_out)
    }
}
