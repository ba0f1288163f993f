//! A block of Z-Image's transformer: attention and a gated feed-forward layer, each between two norms.

use trainable_candle_core::ops::gated_add::gated_add;
use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Init, Layer, Linear, LinearGroup, Module, RmsNorm, Visitor, Weights};

use super::ZImageConfig;
use crate::layers::joint::{AttentionInputs, SelfAttention};
use crate::saved::Saved;

/// The number of vectors of D values in the modulation: scale and gate of the attention, then scale and gate of the
/// feed-forward layer.
const VECTORS: usize = 4;
/// The index of the attention's scale among these vectors. The gate follows.
const ATTENTION_SCALE: usize = 0;
/// The index of the feed-forward layer's scale among these vectors. The gate follows.
const FEED_FORWARD_SCALE: usize = 2;

/// Two halves: first f is the attention, then f is the feed-forward layer. Each half computes x + tanh(g) ·
/// norm₂(f(norm₁(x) · (1 + s))) with its own two norms. The block computes a scale s and a gate g for each half from
/// the condition. Without modulation, s is 0 and tanh(g) is 1.
pub(super) struct Block {
    modulation: Option<Linear<Tensor>>,
    attention: SelfAttention,
    attention_norms: [RmsNorm; 2],
    feed_forward: FeedForward,
    feed_forward_norms: [RmsNorm; 2],
    /// Features of each token, D.
    dim: usize,
}

/// The feed-forward layer: w2(silu(w1 x) · w3 x).
struct FeedForward {
    /// `w3` (the features) and `w1` (their gate): `LinearGroup::feed_forward` takes them in this order.
    inner: LinearGroup,
    w2: Linear<Tensor>,
}

impl FeedForward {
    fn new(config: &ZImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, middle) = (config.dim, config.middle());
        // `false`: the layers have no bias.
        Ok(Self {
            inner: weights.linear_group(&[("w3", middle), ("w1", middle)], dim, false, Init::Kaiming)?,
            w2: weights.linear("w2", middle, dim, false)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.feed_forward(x, &self.w2)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens.
    fn saved(&self, tokens: usize, saved: &mut Saved) {
        let hidden = tokens * self.w2.in_features();
        // The input of `inner` is a norm's result, which selective checkpointing recomputes.
        let is_input_cheap = true;
        // The pairs are the number of values of the layers' input and the number of tokens. The network's input is as
        // wide as its output, the result of `w2`.
        saved.layers(&self.inner.layers(), (tokens * self.w2.out_features(), tokens), is_input_cheap);
        // The tape keeps the features and their gate.
        saved.keep(2 * hidden);
        saved.layers_of_recomputed_input(&[Layer::Linear(&self.w2)], (hidden, tokens));
    }
}

impl Module for FeedForward {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.inner.visit(visitor)?;
        visitor.linear("w2", &self.w2)
    }
}

impl Block {
    /// Builds the block from the parameters below `weights`. `is_modulated` is false for blocks that process only the
    /// text.
    pub fn new(config: &ZImageConfig, is_modulated: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = config.dim;
        let mut norm = |name| weights.rms_norm(name, dim, config.norm_eps);
        let attention_norms = [norm("attention_norm1")?, norm("attention_norm2")?];
        let feed_forward_norms = [norm("ffn_norm1")?, norm("ffn_norm2")?];
        let condition = config.condition_dim();
        let has_bias = true;
        let mut modulation = || weights.linear("adaLN_modulation.0", condition, VECTORS * dim, has_bias);
        Ok(Self {
            modulation: if is_modulated { Some(modulation()?) } else { None },
            attention: SelfAttention::new(config.attention(), &mut weights.pp("attention"))?,
            attention_norms,
            feed_forward: FeedForward::new(config, &mut weights.pp("feed_forward"))?,
            feed_forward_norms,
            dim,
        })
    }

    /// Computes the modulation (B, 4 · D) from `condition (B, C)`, for [`forward`](Self::forward). None if the block is
    /// not modulated.
    pub fn modulation(&self, condition: &Tensor) -> Result<Option<Tensor>> {
        self.modulation.as_ref().map(|layer| layer.forward(condition)).transpose()
    }

    /// Computes the block's result for the tokens `x (B, S, D)`, in the same shape. `modulation` is the result of
    /// [`modulation`](Self::modulation).
    pub fn forward(
        &self,
        x: &Tensor,
        modulation: Option<&Tensor>,
        attention_inputs: AttentionInputs<'_>,
    ) -> Result<Tensor> {
        let attend = |x: &Tensor| self.attention.forward(x, attention_inputs);
        let x = self.half(x, &self.attention_norms, modulation.map(|vectors| (vectors, ATTENTION_SCALE)), attend)?;
        let feed = |x: &Tensor| self.feed_forward.forward(x);
        self.half(&x, &self.feed_forward_norms, modulation.map(|vectors| (vectors, FEED_FORWARD_SCALE)), feed)
    }

    /// Computes one half of the block: `run` (the attention or the feed-forward layer) between its two norms, and the
    /// residual sum. `modulation` is a pair: the [`VECTORS`] vectors of the block, (B, 4 · D), and the index of the
    /// half's scale among them. The half's gate is the next vector.
    fn half(
        &self,
        x: &Tensor,
        [before, after]: &[RmsNorm; 2],
        modulation: Option<(&Tensor, usize)>,
        run: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let normed = before.forward(x)?;
        let Some((vectors, scale_index)) = modulation else { return x.add(&after.forward(&run(&normed)?)?) };
        // One of the vectors, (B, 1, D).
        let vector = |index: usize| vectors.narrow(1, index * self.dim, self.dim)?.unsqueeze(1);
        let result = after.forward(&run(&normed.mul(&vector(scale_index)?.add_scalar(1.0)?)?)?)?;
        gated_add(x, &result, &vector(scale_index + 1)?.tanh()?)
    }

    /// Adds to `saved` what the tape keeps for `tokens` tokens. `saved.outside` counts the modulation, which is
    /// computed outside of the block's checkpoint.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let values = tokens * self.dim;
        // If the modulation's layer has an adapter, each half keeps the values that its scale and its gate multiply.
        let is_adapted = self.modulation.as_ref().is_some_and(|layer| saved.adapts(layer));
        let multiplied = if is_adapted { 2 * values } else { 0 };
        saved.outside(|saved| {
            // One condition for a sample, as one token.
            self.modulation.iter().for_each(|layer| saved.linear(layer, (layer.in_features(), 1)));
        });
        // Full checkpointing recomputes this block by itself, not together with the previous one.
        let continues_previous = false;
        saved.block(values, continues_previous, |saved| {
            // The tape keeps the inputs of the four norms: the block's input, the attention's result, the residual sum
            // after the attention (which selective checkpointing recomputes), and the feed-forward layer's result.
            saved.keep(values);
            self.attention.saved(tokens, saved);
            saved.keep(values);
            saved.keep_cheap(values + multiplied);
            self.feed_forward.saved(tokens, saved);
            saved.keep(values);
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
