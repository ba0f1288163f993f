//! Computes the condition that all blocks of a joint transformer (such as those of SD3 and Flux) read, from the time,
//! the pooled text embedding and the guidance scale. Follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/embeddings.py>,
//! `CombinedTimestepTextProjEmbeddings` and `CombinedTimestepGuidanceTextProjEmbeddings`.

use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Module, Visitor, Weights};

use crate::layers::timestep::LINEAR;
use crate::layers::{Sinusoids, TimestepEmbedding};
use crate::saved::Saved;

/// Number of sinusoidal features of the time, and of the guidance scale.
const SINUSOIDS: usize = 256;

/// The sizes of a [`TimeTextEmbedding`].
#[derive(Clone, Copy, Debug)]
pub struct ConditionSizes {
    /// Width of the condition.
    pub dim: usize,
    /// Width of the pooled text embedding, if the model takes one.
    pub pooled: Option<usize>,
    /// Whether the model takes a guidance scale as an input (guidance distillation).
    pub guidance: bool,
    /// Whether the linear layers have biases.
    pub bias: bool,
}

/// Embeds the time and, if the model takes them, the pooled text embedding and the guidance scale. Each has a small
/// network of its own; the condition is the sum of the networks' results.
pub struct TimeTextEmbedding {
    sinusoids: Sinusoids,
    time: TimestepEmbedding,
    guidance: Option<TimestepEmbedding>,
    text: Option<TimestepEmbedding>,
}

impl TimeTextEmbedding {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: ConditionSizes, weights: &mut Weights<'_>) -> Result<Self> {
        // Two linear layers with the names in `LINEAR`: from `width` to `dim` features, then from `dim` to `dim`.
        let mut embedding = |name, width| {
            TimestepEmbedding::named(LINEAR, [width, sizes.dim, sizes.dim], sizes.bias, &mut weights.pp(name))
        };
        let time = embedding("timestep_embedder", SINUSOIDS)?;
        Ok(Self {
            sinusoids: Sinusoids::new(SINUSOIDS, time.device())?,
            guidance: sizes.guidance.then(|| embedding("guidance_embedder", SINUSOIDS)).transpose()?,
            text: sizes.pooled.map(|pooled| embedding("text_embedder", pooled)).transpose()?,
            time,
        })
    }

    /// SiLU of the condition, (B, D), which every block reads. `times` are from 0 to 1000, (B) or (1). `pooled` is the
    /// pooled text embedding, (B, P) with P = [`ConditionSizes::pooled`]. `guidance` is the guidance scale times 1000,
    /// (B) or (1). Callers must give `pooled` and `guidance` if the model takes them; otherwise they are ignored.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Shape`] if an input does not fit.
    pub fn forward(&self, times: &Tensor, pooled: Option<&Tensor>, guidance: Option<&Tensor>) -> Result<Tensor> {
        // The times stay in f32 until their sinusoids are computed. diffusers rounds them to the dtype of the model,
        // although bf16 represents few of them exactly.
        let mut condition = self.time.forward(&self.sinusoids.forward(times)?)?;
        if let (Some(embedding), Some(guidance)) = (&self.guidance, guidance) {
            condition = condition.add(&embedding.forward(&self.sinusoids.forward(guidance)?)?)?;
        }
        if let (Some(embedding), Some(pooled)) = (&self.text, pooled) {
            condition = condition.add(&embedding.forward(pooled)?)?;
        }
        condition.silu()
    }

    /// Adds to `saved` what the tape keeps for one sample.
    pub fn saved(&self, saved: &mut Saved) {
        self.time.saved(saved);
        self.guidance.iter().for_each(|guidance| guidance.saved(saved));
        self.text.iter().for_each(|text| text.saved(saved));
    }
}

impl Module for TimeTextEmbedding {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("timestep_embedder", &self.time)?;
        self.guidance.iter().try_for_each(|guidance| visitor.module("guidance_embedder", guidance))?;
        self.text.iter().try_for_each(|text| visitor.module("text_embedder", text))
    }
}
