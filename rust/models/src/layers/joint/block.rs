//! The double-stream block of transformers such as SD3 and FLUX: image tokens and text tokens have weights of their
//! own, and meet in joint attention.

use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Linear, Module, Visitor, Weights};

use super::attention::{JointAttention, SelfAttention};
use super::modulation::{gated_add, modulated};
use super::{AttentionInputs, BlockSizes, FeedForward, FeedForwardKind};
use crate::saved::Saved;

/// The names of those layers of a double-stream block that models name differently. In each pair, the image's layer
/// comes first, then the text's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoubleBlockNames {
    /// The layers that compute the modulation.
    pub norms: [&'static str; 2],
    /// The feed-forward layers.
    pub feed_forward: [&'static str; 2],
}

impl Default for DoubleBlockNames {
    fn default() -> Self {
        Self { norms: ["norm1.linear", "norm1_context.linear"], feed_forward: ["ff", "ff_context"] }
    }
}

/// Properties in which the double-stream blocks of models differ.
#[derive(Clone, Copy, Debug, Default)]
pub struct DoubleBlockKind {
    /// Whether the block has a second attention, in which image tokens attend to image tokens only (SD3.5-medium's
    /// "dual attention").
    pub dual: bool,
    /// Whether the block returns the text unchanged. The last block of some models does, because no later layer reads
    /// the text.
    pub image_only: bool,
    /// Whether the model computes the modulation and passes it to the block. The block then has no layers that compute
    /// the modulation.
    pub takes_modulation: bool,
    /// The kind of the block's feed-forward networks.
    pub feed_forward: FeedForwardKind,
    /// The names of layers that models name differently.
    pub names: DoubleBlockNames,
}

/// Joint attention of image and text tokens, then a feed-forward network for each stream. The input of the attention
/// and of each network is normalised and modulated; the result is multiplied by a gate and added to the residual
/// stream.
pub struct DoubleBlock {
    /// The layers that compute the modulation of the image and of the text (diffusers names them as parts of the
    /// norms); None if the model passes the modulation.
    norms: Option<[Linear<Tensor>; 2]>,
    names: DoubleBlockNames,
    dim: usize,
    attn: JointAttention,
    /// The second attention of the image ([`DoubleBlockKind::dual`]).
    attn2: Option<SelfAttention>,
    ff: FeedForward,
    /// The feed-forward network of the text; None if the block returns the text unchanged.
    ff_context: Option<FeedForward>,
}

impl DoubleBlock {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: BlockSizes, kind: DoubleBlockKind, weights: &mut Weights<'_>) -> Result<Self> {
        let dim = sizes.dim();
        // The numbers of vectors (B, D) in the modulations: shift, scale and gate of each attention and of the
        // feed-forward network. For a text that the block returns unchanged: shift and scale.
        let image_parts = if kind.dual { 9 } else { 6 };
        let text_parts = if kind.image_only { 2 } else { 6 };
        let mut norm = |name, parts: usize| weights.linear(name, dim, parts * dim, sizes.bias);
        let names = kind.names;
        let norms = if kind.takes_modulation {
            None
        } else {
            Some([norm(names.norms[0], image_parts)?, norm(names.norms[1], text_parts)?])
        };
        let feed_forward = |weights: &mut Weights<'_>| FeedForward::new(sizes, kind.feed_forward, weights);
        Ok(Self {
            norms,
            names,
            dim,
            attn: JointAttention::new(sizes, kind.image_only, &mut weights.pp("attn"))?,
            attn2: kind.dual.then(|| SelfAttention::new(sizes, &mut weights.pp("attn2"))).transpose()?,
            ff: feed_forward(&mut weights.pp(names.feed_forward[0]))?,
            ff_context: (!kind.image_only).then(|| feed_forward(&mut weights.pp(names.feed_forward[1]))).transpose()?,
        })
    }

    /// The modulation of the image and of the text, each (B, parts · D), for [`forward`](Self::forward), from the
    /// condition `(B, D)` after SiLU.
    ///
    /// # Errors
    /// [`Error::Shape`] if the condition does not fit, [`Error::Argument`] if the block has no layers for the
    /// modulation.
    pub fn modulation(&self, condition: &Tensor) -> Result<[Tensor; 2]> {
        let Some([image, text]) = &self.norms else {
            return Err(Error::argument("DoubleBlock", "the block has no modulation of its own"));
        };
        Ok([image.forward(condition)?, text.forward(condition)?])
    }

    /// The tokens `image (B, S, D)` and `text (B, L, D)` after the block, in the same shapes. The modulations are those
    /// of [`modulation`](Self::modulation), or those that the model passes.
    ///
    /// # Errors
    /// [`Error::Shape`] if an input does not fit.
    pub fn forward(
        &self,
        [image, text]: [&Tensor; 2],
        [image_modulation, text_modulation]: [&Tensor; 2],
        attention_inputs: AttentionInputs<'_>,
    ) -> Result<[Tensor; 2]> {
        let dim = image.dims()[2];
        let part = |modulation: &Tensor, index: usize| modulation.narrow(1, index * dim, dim);
        // Parts 0 to 2 are shift, scale and gate of the joint attention, 3 to 5 those of the feed-forward network, and
        // 6 to 8 those of the second attention.
        let of_image = |index| part(image_modulation, index);
        let of_text = |index| part(text_modulation, index);
        let normed = modulated(image, [&of_image(0)?, &of_image(1)?])?;
        // In a block that returns the text unchanged, the text's modulation begins with the scale, as it does in the
        // model's output layer. In other blocks, it begins with the shift.
        let order = if self.ff_context.is_some() { [0, 1] } else { [1, 0] };
        let normed_text = modulated(text, [&of_text(order[0])?, &of_text(order[1])?])?;
        let (mixed, mixed_text) = self.attn.forward(&normed, &normed_text, attention_inputs)?;
        let text = match (&self.ff_context, mixed_text) {
            (Some(ff), Some(mixed)) => {
                let text = gated_add(text, &mixed, &of_text(2)?)?;
                let ff_result = ff.forward(&modulated(&text, [&of_text(3)?, &of_text(4)?])?)?;
                gated_add(&text, &ff_result, &of_text(5)?)?
            }
            _ => text.clone(),
        };
        // A recomputation ends with the last value that the backward pass reads. Only the gradient of the last gate
        // reads the result of the block's last linear layer, and the gate needs a gradient only if its layer has an
        // adapter. Without one, a checkpoint does not recompute this result. So this function computes the feed-forward
        // network of the image after that of the text: the image usually has more tokens, so this saves more.
        let mut attended = gated_add(image, &mixed, &of_image(2)?)?;
        if let Some(attn2) = &self.attn2 {
            let normed = modulated(image, [&of_image(6)?, &of_image(7)?])?;
            attended = gated_add(&attended, &attn2.forward(&normed, AttentionInputs::default())?, &of_image(8)?)?;
        }
        let ff_result = self.ff.forward(&modulated(&attended, [&of_image(3)?, &of_image(4)?])?)?;
        let image = gated_add(&attended, &ff_result, &of_image(5)?)?;
        Ok([image, text])
    }

    /// Adds to `saved` what the tape keeps for an image of `area` tokens and a text of `length` tokens.
    pub fn saved(&self, area: usize, length: usize, saved: &mut Saved) {
        let dim = self.dim;
        // The layers that compute the modulation run outside of the block's checkpoint. Their input is one condition of
        // D numbers, not a row for each token.
        let (inputs, positions) = (dim, 1);
        saved.outside(|saved| {
            self.norms.iter().flatten().for_each(|layer| saved.linear(layer, (inputs, positions)));
        });
        // Whether the layers that compute the gates of the image and of the text have adapters.
        let [adapts_image, adapts_text] =
            self.norms.as_ref().map_or([false; 2], |norms| [saved.adapts(&norms[0]), saved.adapts(&norms[1])]);
        // The block has a checkpoint of its own: no other block is recomputed together with it.
        let joins_previous = false;
        // The first argument of `block` is the number of input values that the checkpoint keeps. `keep_product` counts
        // results of matrix products, which selective checkpointing keeps in any case; `keep_cheap` counts results that
        // it recomputes.
        saved.block((area + length) * dim, joins_previous, |saved| {
            // The norms before the joint attention keep their inputs.
            saved.keep((area + length) * dim);
            self.attn.saved(area, length, saved);
            if let Some(attn2) = &self.attn2 {
                // The input of the norm before the second attention.
                saved.keep(area * dim);
                attn2.saved(area, saved);
            }
            // The tape keeps the sums after the gates, because norms read them. If the layer that computes a gate has
            // an adapter, the tape also keeps the values that the gate multiplies.
            if let Some(ff) = &self.ff_context {
                saved.keep_product(length * dim, adapts_text);
                saved.keep_cheap(length * dim);
                ff.saved(length, saved);
                saved.keep_product(length * dim, adapts_text);
            }
            saved.keep_product(area * dim, adapts_image);
            saved.keep_cheap(area * dim);
            self.ff.saved(area, saved);
            // The block's last product: without an adapter at the gate, a recomputation ends before it (see `forward`),
            // so selective checkpointing does not keep it either.
            saved.keep(if adapts_image { area * dim } else { 0 });
        });
    }
}

impl Module for DoubleBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        let norms = self.names.norms.iter().zip(self.norms.iter().flatten());
        norms.into_iter().try_for_each(|(name, norm)| visitor.linear(name, norm))?;
        visitor.module("attn", &self.attn)?;
        self.attn2.iter().try_for_each(|attn| visitor.module("attn2", attn))?;
        let [image, text] = self.names.feed_forward;
        visitor.module(image, &self.ff)?;
        self.ff_context.iter().try_for_each(|ff| visitor.module(text, ff))
    }
}
