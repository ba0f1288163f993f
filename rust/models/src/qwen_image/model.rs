//! Qwen-Image's transformer. It predicts the velocity from the time and from tokens of the noisy latents and of the
//! text.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Linear, Module, Quantizable, RmsNorm, Visitor, Weights};

use super::config::PATCH;
use super::{QwenImageConfig, keys};
use crate::layers::joint::{
    AttentionInputs, ConditionSizes, DoubleBlock, DoubleBlockKind, DoubleBlockNames, EPS, ModulatedOutput, RopeAxes,
    TextLengths, TimeTextEmbedding, TokenInputs, TokenSizes, run_double,
};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Key, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The base of the rotary embedding's frequencies; fixed in diffusers.
const THETA: f64 = 10_000.0;
/// The time is multiplied by this number before its sinusoids are computed.
const TIME_SCALE: f64 = 1000.0;

/// Qwen-Image's transformer, with the results and the parameter names of diffusers' `QwenImageTransformer2DModel`. It
/// predicts flow matching's velocity, which is `noise − latents`.
pub struct QwenImageTransformer {
    config: QwenImageConfig,
    img_in: Linear<Tensor>,
    txt_norm: RmsNorm,
    txt_in: Linear<Tensor>,
    time_text_embed: TimeTextEmbedding,
    axes: RopeAxes,
    blocks: Blocks<DoubleBlock>,
    output: ModulatedOutput,
    lengths: TextLengths,
}

/// The inputs of one call except the noisy latents, for B samples of S image tokens and L text tokens. `axes` is the
/// number of axes in `axes_dims_rope`.
#[derive(Clone, Copy)]
pub struct QwenImageConditions<'a> {
    /// The text encoder's tokens, (B, L, joint_attention_dim).
    pub encoder_hidden_states: &'a Tensor,
    /// The time from 0 (clean) to 1 (noise), (B), (1) or a scalar.
    pub timestep: &'a Tensor,
    /// Positions of the image tokens, (S, axes): 0, row, column, with row and column 0 in the image's centre.
    pub img_ids: &'a Tensor,
    /// Positions of the text tokens, (L, axes). All coordinates of text token i are max(h / 2, w / 2) + i, rounded
    /// down, for an image of h × w tokens.
    pub txt_ids: &'a Tensor,
    /// The number of tokens that attention reads of each text, (B), at least 1; the tokens after them are padding. With
    /// `None`, attention reads all tokens and needs no mask, which saves time.
    pub lengths: Option<&'a Tensor>,
}

impl QwenImageTransformer {
    /// The `_class_name` in the transformer's `config.json`.
    pub const CLASS_NAME: &'static str = "QwenImageTransformer2DModel";

    /// Builds a transformer with the parameters of `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: QwenImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, text_dim) = (config.inner_dim(), config.joint_attention_dim);
        let kind = DoubleBlockKind {
            names: DoubleBlockNames { norms: MODULATION, feed_forward: ["img_mlp", "txt_mlp"] },
            ..DoubleBlockKind::default()
        };
        let has_bias = true;
        let img_in = weights.linear("img_in", config.in_channels, dim, has_bias)?;
        let condition_sizes = ConditionSizes { dim, pooled: None, guidance: false, bias: true };
        let block = |i| DoubleBlock::new(config.block(), kind, &mut weights.pp(&format!("transformer_blocks.{i}")));
        Ok(Self {
            blocks: (0..config.num_layers).map(block).collect::<Result<_>>()?,
            axes: RopeAxes::new(&config.axes_dims_rope, THETA, img_in.weight.device())?,
            lengths: TextLengths::new(Self::CLASS_NAME, img_in.weight.device())?,
            img_in,
            txt_norm: weights.rms_norm("txt_norm", text_dim, EPS)?,
            txt_in: weights.linear("txt_in", text_dim, dim, has_bias)?,
            time_text_embed: TimeTextEmbedding::new(condition_sizes, &mut weights.pp("time_text_embed"))?,
            output: ModulatedOutput::new([dim, PATCH * PATCH * config.out_channels], has_bias, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &QwenImageConfig {
        &self.config
    }

    /// Predicts the velocity at the noisy latents `hidden_states (B, S, in_channels)`. Each of the S tokens is a patch
    /// of 2 × 2 latents. The result is `(B, S, 4 out_channels)`, in the dtype of the weights.
    ///
    /// # Errors
    /// As [`TokenSizes::check`] and [`TextLengths::check`]; [`trainable_candle_core::Error::DType`] if `img_ids` and
    /// `txt_ids` have different dtypes.
    pub fn forward(&self, hidden_states: &Tensor, conditions: QwenImageConditions<'_>) -> Result<Tensor> {
        // The numbers of image tokens and of text tokens.
        let [area, length] = self.check(hidden_states, conditions)?;
        let (dtype, batch) = (self.dtype(), hidden_states.dims()[0]);
        // `timestep` may be one time for all samples, but the modulation needs one time for each sample.
        let times = conditions.timestep.reshape(conditions.timestep.elem_count())?.to_dtype(DType::F32)?;
        let times = times.mul_scalar(TIME_SCALE)?.broadcast_as(batch)?;
        let (pooled, guidance) = (None, None);
        let condition = self.time_text_embed.forward(&times, pooled, guidance)?;
        let image = self.img_in.forward(&hidden_states.to_dtype(dtype)?)?;
        let text = self.txt_norm.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let text = self.txt_in.forward(&text)?;
        // In attention, the text tokens come before the image tokens.
        let angles = self.axes.at(&Tensor::cat(&[conditions.txt_ids, conditions.img_ids], 0)?)?;
        let mask = conditions.lengths.map(|lengths| self.lengths.mask(lengths, length, area)).transpose()?;
        let attention_inputs = AttentionInputs { angles: Some(&angles), mask: mask.as_ref() };
        let [image, _] =
            run_double(&self.blocks, [image, text], attention_inputs, |_index, block| block.modulation(&condition))?;
        self.output.forward(&image, &condition)
    }

    /// Checks the inputs, and returns the number of image tokens and the number of text tokens.
    fn check(&self, hidden_states: &Tensor, conditions: QwenImageConditions<'_>) -> Result<[usize; 2]> {
        let QwenImageConditions { encoder_hidden_states, timestep, img_ids, txt_ids, lengths } = conditions;
        let sizes = TokenSizes {
            op: Self::CLASS_NAME,
            channels: self.config.in_channels,
            text: self.config.joint_attention_dim,
            pooled: None,
            axes: self.config.axes_dims_rope.len(),
            guidance: false,
        };
        let [area, length] = sizes.check(TokenInputs {
            hidden_states,
            encoder_hidden_states,
            pooled_projections: None,
            timestep,
            guidance: None,
            img_ids,
            txt_ids,
        })?;
        self.lengths.check(lengths, hidden_states.dims()[0], length)?;
        Ok([area, length])
    }
}

/// The names of a block's layers that compute the modulation of the image and of the text.
const MODULATION: [&str; 2] = ["img_mod.1", "txt_mod.1"];

impl Module for QwenImageTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("time_text_embed", &self.time_text_embed)?;
        visitor.module("txt_norm", &self.txt_norm)?;
        visitor.linear("img_in", &self.img_in)?;
        visitor.linear("txt_in", &self.txt_in)?;
        visitor.blocks("transformer_blocks", &self.blocks)?;
        self.output.visit(visitor)
    }
}

impl Architecture for QwenImageTransformer {
    type Config = QwenImageConfig;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable =
        Quantizable { blocks: &["transformer_blocks."], modulation: &MODULATION, ..Quantizable::NOTHING };

    fn build(config: QwenImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<QwenImageConfig>) -> Result<QwenImageConfig> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &QwenImageConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original)
    }
}

impl Model for QwenImageTransformer {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.output.dtype()
    }

    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        let area = size.height.div_ceil(PATCH) * size.width.div_ceil(PATCH);
        // `outside` counts layers that no checkpoint contains; `output.saved` calls it too. `linear` takes the numbers
        // of input values and of tokens.
        saved.outside(|saved| {
            self.time_text_embed.saved(saved);
            saved.linear(&self.img_in, (area * self.config.in_channels, area));
            saved.linear(&self.txt_in, (size.tokens * self.config.joint_attention_dim, size.tokens));
        });
        saved.each(&self.blocks, |block, saved| block.saved(area, size.tokens, saved));
        self.output.saved(area, saved);
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        // Original checkpoints have the same names.
        Arc::new(|layer| Some(Key::plain(layer)))
    }
}
