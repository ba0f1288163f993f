//! The single-stream block, in which attention and feed-forward network are parallel (Dehghani et al. 2023,
//! arXiv:2302.05442, section 2.1).

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::attention::{Stream, mix};
use super::modulation::{gated_add, modulated};
use super::{BlockSizes, Sight};
use crate::saved::Saved;

/// Width of the feed-forward network's hidden layer, as a multiple of the tokens' width.
const RATIO: usize = 4;
/// The layer that modulates the tokens.
const NORM: &str = "norm.linear";

/// Attention and a feed-forward network, which read the same modulated input. The first layers (`projections`) compute
/// queries, keys, values and the hidden layer. `proj_out` projects the results of attention and of the hidden layer
/// together. The projection is multiplied by a gate and added to the residual stream.
pub struct SingleBlock {
    /// The layer that computes the modulation; None if the model passes the modulation.
    norm: Option<Linear<Tensor>>,
    /// `attn.to_q`, `attn.to_k`, `attn.to_v` and `proj_mlp`.
    projections: LinearGroup,
    /// Norms of queries and keys.
    norms: [RmsNorm; 2],
    proj_out: Linear<Tensor>,
    sizes: BlockSizes,
}

impl SingleBlock {
    /// Takes parameters below `weights`. With `told_modulation`, the model computes the modulation and passes it to the
    /// block, which has no layer for the modulation then.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, told_modulation: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, middle) = (sizes.dim(), RATIO * sizes.dim());
        let projections = [("attn.to_q", dim), ("attn.to_k", dim), ("attn.to_v", dim), ("proj_mlp", middle)];
        let mut norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        Ok(Self {
            norms: [norm("attn.norm_q")?, norm("attn.norm_k")?],
            norm: (!told_modulation).then(|| weights.linear(NORM, dim, 3 * dim, true)).transpose()?,
            projections: weights.linear_group(&projections, dim, true, Init::Kaiming)?,
            proj_out: weights.linear("proj_out", dim + middle, dim, true)?,
            sizes,
        })
    }

    /// The modulation for [`forward`](Self::forward), from the condition `(B, D)` after SiLU.
    ///
    /// # Errors
    /// [`Error::Shape`] if the condition does not fit, [`Error::Argument`] if the block has no layer for the
    /// modulation.
    pub fn modulation(&self, condition: &Tensor) -> Result<Tensor> {
        let Some(norm) = &self.norm else {
            return Err(Error::argument("SingleBlock", "the block has no modulation of its own"));
        };
        norm.forward(condition)
    }

    /// The block's result for the tokens `x (B, S, D)`, in the same shape; `modulation (B, 3 D)` is shift, scale and
    /// gate.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input does not fit.
    pub fn forward(&self, x: &Tensor, modulation: &Tensor, sight: Sight<'_>) -> Result<Tensor> {
        let dim = self.sizes.dim();
        let part = |index: usize| modulation.narrow(1, index * dim, dim);
        let projected = self.projections.forward(&modulated(x, [&part(0)?, &part(1)?])?)?;
        let stream = Stream { projected, norms: Some(&self.norms), angles: sight.angles.cloned() };
        let mixed = mix(std::slice::from_ref(&stream), self.sizes, sight.mask)?;
        let both = match &stream.projected {
            Projected::Joined(all) => activate_beside(Some(&mixed), all, 3 * dim, Activation::GeluTanh)?,
            Projected::Separate(parts) => Tensor::cat(&[&mixed, &parts[3].gelu(Gelu::Tanh)?], 2)?,
        };
        gated_add(x, &self.proj_out.forward(&both)?, &part(2)?)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let dim = self.sizes.dim();
        let inside = tokens * dim;
        let gate = self.norm.as_ref().is_some_and(|norm| saved.adapts(norm));
        saved.outside(|saved| self.norm.iter().for_each(|norm| saved.linear(norm, (dim, 1))));
        saved.block(inside, false, |saved| {
            saved.keep(inside);
            saved.layers(&self.projections.layers(), (inside, tokens), true);
            // The tape keeps the results of `projections` and of the attention.
            saved.attention(tokens, tokens, dim);
            saved.keep((3 + 1 + RATIO) * inside);
            saved.cheap_linear(&self.proj_out, ((1 + RATIO) * inside, tokens));
            // If the layer that computes the gate is adapted, the tape keeps the values that the gate multiplies.
            // Otherwise checkpoints do not recompute these values.
            saved.keep(if gate { inside } else { 0 });
        });
    }
}

impl Module for SingleBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.norm.iter().try_for_each(|norm| visitor.linear(NORM, norm))?;
        self.projections.visit(visitor)?;
        visitor.module("attn.norm_q", &self.norms[0])?;
        visitor.module("attn.norm_k", &self.norms[1])?;
        visitor.linear("proj_out", &self.proj_out)
    }
}
