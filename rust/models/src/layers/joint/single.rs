//! The block of one stream, attention and feed-forward layer side by side (Dehghani et al. 2023, arXiv:2302.05442, section 2.1).

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::attention::{Stream, mix};
use super::modulation::{gated_add, modulated};
use super::{BlockSizes, Rope};
use crate::saved::Saved;

/// Width of the feed-forward layer's middle, as a multiple of the tokens'.
const RATIO: usize = 4;

/// Queries, keys, values and the feed-forward layer's middle in one product of the modulated input; the result of both in one product,
/// gated and added to the input.
pub struct SingleBlock {
    norm: Linear<Tensor>,
    /// `attn.to_q`, `attn.to_k`, `attn.to_v` and `proj_mlp`.
    projections: LinearGroup,
    /// Of queries and keys.
    norms: [RmsNorm; 2],
    proj_out: Linear<Tensor>,
    sizes: BlockSizes,
}

impl SingleBlock {
    /// Parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, middle) = (sizes.dim(), RATIO * sizes.dim());
        let projections = [("attn.to_q", dim), ("attn.to_k", dim), ("attn.to_v", dim), ("proj_mlp", middle)];
        let mut norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        Ok(Self {
            norms: [norm("attn.norm_q")?, norm("attn.norm_k")?],
            norm: weights.linear("norm.linear", dim, 3 * dim, true)?,
            projections: weights.linear_group(&projections, dim, true, Init::Kaiming)?,
            proj_out: weights.linear("proj_out", dim + middle, dim, true)?,
            sizes,
        })
    }

    /// What the condition `(B, D)`, after SiLU, says; for [`forward`](Self::forward).
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if the condition does not fit.
    pub fn modulation(&self, condition: &Tensor) -> Result<Tensor> {
        self.norm.forward(condition)
    }

    /// `x (B, S, D)` → the same shape.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, x: &Tensor, modulation: &Tensor, angles: Option<&Rope>) -> Result<Tensor> {
        let dim = self.sizes.dim();
        let said = |index: usize| modulation.narrow(1, index * dim, dim);
        let projected = self.projections.forward(&modulated(x, [&said(0)?, &said(1)?])?)?;
        let stream = Stream { projected, norms: Some(&self.norms), angles: angles.cloned() };
        let mixed = mix(std::slice::from_ref(&stream), self.sizes, None)?;
        let both = match &stream.projected {
            Projected::Joined(all) => activate_beside(Some(&mixed), all, 3 * dim, Activation::GeluTanh)?,
            Projected::Separate(parts) => Tensor::cat(&[&mixed, &parts[3].gelu(Gelu::Tanh)?], 2)?,
        };
        gated_add(x, &self.proj_out.forward(&both)?, &said(2)?)
    }

    /// What the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let dim = self.sizes.dim();
        let inside = tokens * dim;
        let gate = saved.adapts(&self.norm);
        saved.outside(|saved| saved.linear(&self.norm, (dim, 1)));
        saved.block(inside, false, |saved| {
            saved.keep(inside);
            saved.layers(&self.projections.layers(), (inside, tokens), true);
            // The result of the first layers, and that of the attention.
            saved.attention(tokens, tokens, dim);
            saved.keep((3 + 1 + RATIO) * inside);
            saved.cheap_linear(&self.proj_out, ((1 + RATIO) * inside, tokens));
            // What the gate multiplies, if it learns; no checkpoint computes it otherwise.
            saved.keep(if gate { inside } else { 0 });
        });
    }
}

impl Module for SingleBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.linear("norm.linear", &self.norm)?;
        self.projections.visit(visitor)?;
        visitor.module("attn.norm_q", &self.norms[0])?;
        visitor.module("attn.norm_k", &self.norms[1])?;
        visitor.linear("proj_out", &self.proj_out)
    }
}
