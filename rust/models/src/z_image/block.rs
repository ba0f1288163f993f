//! The block: attention and a gated feed-forward layer, each between two norms.

use trainable_candle_core::ops::gated_add::gated_add;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Layer, Linear, LinearGroup, Module, RmsNorm, Visitor, Weights};

use super::ZImageConfig;
use crate::layers::joint::{SelfAttention, Sight};
use crate::saved::Saved;

/// The number of vectors of D values in the modulation: scale and gate of the attention, then scale and gate of the
/// feed-forward layer.
const PARTS: usize = 4;

/// Attention, then a feed-forward layer. Both compute x + tanh(g) · norm(f(norm(x) · (1 + s))), where f is the
/// attention or the feed-forward layer. The block computes a scale s and a gate g for each of the two from the
/// condition. Without modulation, s is 0 and tanh(g) is 1.
pub(super) struct Block {
    modulation: Option<Linear<Tensor>>,
    attention: SelfAttention,
    attention_norms: [RmsNorm; 2],
    feed_forward: FeedForward,
    feed_forward_norms: [RmsNorm; 2],
    dim: usize,
}

/// The feed-forward layer: w2(silu(w1 x) · w3 x).
struct FeedForward {
    /// `w3` (the features) and `w1` (their gate): `LinearGroup::forward_swiglu` takes them in this order.
    inner: LinearGroup,
    w2: Linear<Tensor>,
}

impl FeedForward {
    fn new(config: &ZImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, middle) = (config.dim, config.middle());
        Ok(Self {
            inner: weights.linear_group(&[("w3", middle), ("w1", middle)], dim, false, Init::Kaiming)?,
            w2: weights.linear("w2", middle, dim, false)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.feed_forward(x, &self.w2)
    }

    fn saved(&self, tokens: usize, saved: &mut Saved) {
        let middle = tokens * self.w2.in_features();
        saved.layers(&self.inner.layers(), (tokens * self.w2.out_features(), tokens), true);
        saved.keep(2 * middle);
        saved.remade_layers(&[Layer::Linear(&self.w2)], (middle, tokens));
    }
}

impl Module for FeedForward {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.inner.visit(visitor)?;
        visitor.linear("w2", &self.w2)
    }
}

impl Block {
    /// Takes the parameters below `weights`. `is_modulated` is false for the blocks that process only the text.
    pub fn new(config: &ZImageConfig, is_modulated: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = config.dim;
        let mut norm = |name| weights.rms_norm(name, dim, config.norm_eps);
        let attention_norms = [norm("attention_norm1")?, norm("attention_norm2")?];
        let feed_forward_norms = [norm("ffn_norm1")?, norm("ffn_norm2")?];
        let condition = config.condition_dim();
        let mut modulation = || weights.linear("adaLN_modulation.0", condition, PARTS * dim, true);
        Ok(Self {
            modulation: if is_modulated { Some(modulation()?) } else { None },
            attention: SelfAttention::new(config.attention(), &mut weights.pp("attention"))?,
            attention_norms,
            feed_forward: FeedForward::new(config, &mut weights.pp("feed_forward"))?,
            feed_forward_norms,
            dim,
        })
    }

    /// The modulation by the condition `(B, C)`, for [`forward`](Self::forward); none if the block is not modulated.
    pub fn modulation(&self, condition: &Tensor) -> Result<Option<Tensor>> {
        self.modulation.as_ref().map(|layer| layer.forward(condition)).transpose()
    }

    /// The block's result for the tokens `x (B, S, D)`, in the same shape.
    pub fn forward(&self, x: &Tensor, modulation: Option<&Tensor>, sight: Sight<'_>) -> Result<Tensor> {
        let attend = |x: &Tensor| self.attention.forward(x, sight);
        let x = self.part(x, &self.attention_norms, modulation.map(|all| (all, 0)), attend)?;
        let feed = |x: &Tensor| self.feed_forward.forward(x);
        self.part(&x, &self.feed_forward_norms, modulation.map(|all| (all, 2)), feed)
    }

    /// Computes one half of the block: `run` (the attention or the feed-forward layer) between its two norms, and the
    /// residual sum. `modulation` is a pair: the modulation of the whole block, and the index of the half's scale among
    /// the [`PARTS`] vectors. The half's gate is the next vector.
    fn part(
        &self,
        x: &Tensor,
        [before, after]: &[RmsNorm; 2],
        modulation: Option<(&Tensor, usize)>,
        run: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let normed = before.forward(x)?;
        let Some((all, place)) = modulation else { return x.add(&after.forward(&run(&normed)?)?) };
        let part = |index: usize| all.narrow(1, index * self.dim, self.dim)?.unsqueeze(1);
        let result = after.forward(&run(&normed.mul(&part(place)?.add_scalar(1.0)?)?)?)?;
        gated_add(x, &result, &part(place + 1)?.tanh()?)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let inside = tokens * self.dim;
        // If the modulation's layer has an adapter, the tape keeps the values that scales and gates multiply.
        let learns = self.modulation.as_ref().is_some_and(|layer| saved.adapts(layer));
        let multiplied = if learns { 2 * inside } else { 0 };
        saved.outside(|saved| {
            self.modulation.iter().for_each(|layer| saved.linear(layer, (layer.in_features(), 1)));
        });
        saved.block(inside, false, |saved| {
            // The tape keeps the inputs of the four norms: the block's input, the attention's result, the residual sum
            // after the attention (which selective checkpointing recomputes), and the feed-forward layer's result.
            saved.keep(inside);
            self.attention.saved(tokens, saved);
            saved.keep(inside);
            saved.keep_cheap(inside + multiplied);
            self.feed_forward.saved(tokens, saved);
            saved.keep(inside);
            saved.keep_cheap(multiplied);
        });
    }
}

impl Module for Block {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("attention", &self.attention)?;
        visitor.module("feed_forward", &self.feed_forward)?;
        visitor.module("attention_norm1", &self.attention_norms[0])?;
        visitor.module("ffn_norm1", &self.feed_forward_norms[0])?;
        visitor.module("attention_norm2", &self.attention_norms[1])?;
        visitor.module("ffn_norm2", &self.feed_forward_norms[1])?;
        self.modulation.iter().try_for_each(|layer| visitor.linear("adaLN_modulation.0", layer))
    }
}
