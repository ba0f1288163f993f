//! The single-stream block, in which attention and feed-forward network are parallel (Dehghani et al. 2023,
//! arXiv:2302.05442, section 2.1).

use trainable_candle_core::ops::activation::Gelu;
use trainable_candle_core::ops::beside::{Activation, activate_beside};
use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Init, Linear, LinearGroup, Module, Projected, RmsNorm, Visitor, Weights};

use super::attention::{Stream, mix};
use super::modulation::{gated_add, modulated};
use super::{AttentionInputs, BlockSizes};
use crate::saved::Saved;

/// Width of the feed-forward network's hidden layer, as a multiple of the tokens' width.
const RATIO: usize = 4;
/// The name of the layer that computes the modulation.
const MODULATION: &str = "norm.linear";

/// Attention and a feed-forward network, which read the same modulated input. The first layers (`projections`) compute
/// queries, keys, values and the network's hidden layer. `proj_out` reads the result of attention and the activation of
/// the hidden layer side by side. Its result is multiplied by a gate and added to the residual stream.
pub struct SingleBlock {
    /// The layer that computes the modulation; None if the model passes the modulation.
    modulator: Option<Linear<Tensor>>,
    /// `attn.to_q`, `attn.to_k`, `attn.to_v` and `proj_mlp`.
    projections: LinearGroup,
    /// Norms of queries and keys, per head.
    norms: [RmsNorm; 2],
    proj_out: Linear<Tensor>,
    sizes: BlockSizes,
}

impl SingleBlock {
    /// Takes parameters below `weights`. With `takes_modulation`, the model computes the modulation and passes it to
    /// the block. The block then has no layer that computes the modulation.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, takes_modulation: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let (dim, hidden) = (sizes.dim(), RATIO * sizes.dim());
        let projections = [("attn.to_q", dim), ("attn.to_k", dim), ("attn.to_v", dim), ("proj_mlp", hidden)];
        let has_bias = true;
        let mut rms_norm = |name| weights.rms_norm(name, sizes.head_dim, sizes.eps);
        Ok(Self {
            norms: [rms_norm("attn.norm_q")?, rms_norm("attn.norm_k")?],
            modulator: (!takes_modulation).then(|| weights.linear(MODULATION, dim, 3 * dim, has_bias)).transpose()?,
            projections: weights.linear_group(&projections, dim, has_bias, Init::Kaiming)?,
            proj_out: weights.linear("proj_out", dim + hidden, dim, has_bias)?,
            sizes,
        })
    }

    /// Computes the modulation `(B, 3 D)` that [`forward`](Self::forward) takes, for B samples and tokens of width D.
    /// SiLU is already applied to `condition (B, D)`.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if `condition` does not fit, [`Error::Argument`] if the block has no layer
    /// that computes the modulation.
    pub fn modulation(&self, condition: &Tensor) -> Result<Tensor> {
        let Some(modulator) = &self.modulator else {
            return Err(Error::argument("SingleBlock", "the block has no modulation of its own"));
        };
        modulator.forward(condition)
    }

    /// Returns the block's result for S tokens `x (B, S, D)`, in the same shape. `modulation (B, 3 D)` consists of
    /// shift, scale and gate.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if an input does not fit.
    pub fn forward(&self, x: &Tensor, modulation: &Tensor, attention_inputs: AttentionInputs<'_>) -> Result<Tensor> {
        let dim = self.sizes.dim();
        // 0: shift, 1: scale, 2: gate.
        let part = |index: usize| modulation.narrow(1, index * dim, dim);
        let projected = self.projections.forward(&modulated(x, [&part(0)?, &part(1)?])?)?;
        let stream = Stream { projected, norms: Some(&self.norms), angles: attention_inputs.angles.cloned() };
        let mixed = mix(std::slice::from_ref(&stream), self.sizes, attention_inputs.mask)?;
        // The hidden layer follows queries, keys and values: in one tensor it begins at column 3 D, in a list it is
        // element 3.
        let mixed_and_activated = match &stream.projected {
            Projected::Joined(all) => activate_beside(Some(&mixed), all, 3 * dim, Activation::GeluTanh)?,
            Projected::Separate(results) => Tensor::cat(&[&mixed, &results[3].gelu(Gelu::Tanh)?], 2)?,
        };
        gated_add(x, &self.proj_out.forward(&mixed_and_activated)?, &part(2)?)
    }

    /// Adds to `saved` what the tape keeps for a sample of `tokens` tokens.
    pub fn saved(&self, tokens: usize, saved: &mut Saved) {
        let dim = self.sizes.dim();
        let values = tokens * dim;
        let is_gate_adapted = self.modulator.as_ref().is_some_and(|modulator| saved.adapts(modulator));
        // The modulation is computed once for the sample, before the block and outside of its checkpoint. Here and
        // below, the pair after a layer or layers has the number of input values of all tokens together, and the number
        // of tokens. The modulation has one input vector, the condition.
        saved.outside(|saved| self.modulator.iter().for_each(|modulator| saved.linear(modulator, (dim, 1))));
        // A checkpoint has this block alone. Selective checkpointing recomputes the input of `projections`, a norm.
        let (joins_previous, is_input_cheap) = (false, true);
        saved.block(values, joins_previous, |saved| {
            // The norm keeps its input.
            saved.keep(values);
            saved.layers(&self.projections.layers(), (values, tokens), is_input_cheap);
            let (queries, keys) = (tokens, tokens);
            saved.attention(queries, keys, dim);
            // The tape keeps queries, keys and values (3), the result of attention (1) and the hidden layer.
            // Selective checkpointing recomputes the input of `proj_out` from the last two.
            saved.keep((3 + 1 + RATIO) * values);
            saved.cheap_linear(&self.proj_out, ((1 + RATIO) * values, tokens));
            // If the layer that computes the gate is adapted, the tape keeps the values that the gate multiplies.
            // Otherwise the backward pass does not read these values, so checkpoints do not recompute them.
            saved.keep(if is_gate_adapted { values } else { 0 });
        });
    }
}

impl Module for SingleBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.modulator.iter().try_for_each(|modulator| visitor.linear(MODULATION, modulator))?;
        self.projections.visit(visitor)?;
        visitor.module("attn.norm_q", &self.norms[0])?;
        visitor.module("attn.norm_k", &self.norms[1])?;
        visitor.linear("proj_out", &self.proj_out)
    }
}
