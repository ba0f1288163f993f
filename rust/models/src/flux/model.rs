//! Flux.1's transformer. It predicts the velocity from noisy latents (as tokens), time, text and guidance scale.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Linear, Module, Quantizable, Visitor, Weights};

use super::{FluxConfig, keys};
use crate::layers::joint::{
    AttentionInputs, ConditionSizes, DoubleBlock, DoubleBlockKind, ModulatedOutput, RopeAxes, SingleBlock,
    TimeTextEmbedding, TokenInputs, TokenSizes, run_double, run_single,
};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The base of the rotary embedding's frequencies; fixed in diffusers.
const THETA: f64 = 10_000.0;
/// The factor by which the time and the guidance scale are multiplied before their sinusoids are computed.
const TIME_SCALE: f64 = 1000.0;
/// Number of latents along one side of the square patch that becomes a token.
const PATCH: usize = 2;

/// Flux.1's transformer, with the results and the parameter names of diffusers' `FluxTransformer2DModel`. It predicts
/// the velocity of flow matching, `noise - latents`.
pub struct FluxTransformer {
    config: FluxConfig,
    x_embedder: Linear<Tensor>,
    context_embedder: Linear<Tensor>,
    time_text_embed: TimeTextEmbedding,
    /// Computes the rotary embedding's angles from the tokens' positions.
    axes: RopeAxes,
    double_blocks: Blocks<DoubleBlock>,
    single_blocks: Blocks<SingleBlock>,
    output: ModulatedOutput,
}

/// The inputs of one forward pass except the noisy latents, for B samples of S image tokens and L text tokens.
#[derive(Clone, Copy)]
pub struct FluxConditions<'a> {
    /// The text encoder's tokens, (B, L, joint_attention_dim).
    pub encoder_hidden_states: &'a Tensor,
    /// The pooled text embedding, (B, pooled_projection_dim).
    pub pooled_projections: &'a Tensor,
    /// The time from 0 (clean) to 1 (noise): (B), (1) or a scalar.
    pub timestep: &'a Tensor,
    /// Positions of the image's tokens, (S, axes): 0, row, column.
    pub img_ids: &'a Tensor,
    /// Positions of the text's tokens, (L, axes): zeros.
    pub txt_ids: &'a Tensor,
    /// The guidance scale: (B), (1) or a scalar; None for a model that takes no guidance scale.
    pub guidance: Option<&'a Tensor>,
}

impl FluxTransformer {
    /// The `_class_name` in its `config.json`.
    pub const CLASS_NAME: &'static str = "FluxTransformer2DModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the configuration is wrong; as [`Weights::get`].
    pub fn new(config: FluxConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        // `takes_modulation` is false: each single block computes its own modulation from the condition.
        let (dim, bias, takes_modulation) = (config.inner_dim(), true, false);
        let (pooled, guidance) = (config.pooled_projection_dim, config.guidance_embeds);
        let x_embedder = weights.linear("x_embedder", config.in_channels, dim, bias)?;
        let condition_sizes = ConditionSizes { dim, pooled: Some(pooled), guidance, bias };
        Ok(Self {
            axes: RopeAxes::new(&config.axes_dims_rope, THETA, x_embedder.weight.device())?,
            x_embedder,
            context_embedder: weights.linear("context_embedder", config.joint_attention_dim, dim, bias)?,
            time_text_embed: TimeTextEmbedding::new(condition_sizes, &mut weights.pp("time_text_embed"))?,
            double_blocks: (0..config.num_layers)
                .map(|i| {
                    let kind = DoubleBlockKind::default();
                    DoubleBlock::new(config.block(), kind, &mut weights.pp(&format!("transformer_blocks.{i}")))
                })
                .collect::<Result<_>>()?,
            single_blocks: (0..config.num_single_layers)
                .map(|i| {
                    let weights = &mut weights.pp(&format!("single_transformer_blocks.{i}"));
                    SingleBlock::new(config.block(), takes_modulation, weights)
                })
                .collect::<Result<_>>()?,
            output: ModulatedOutput::new([dim, config.out_channels], bias, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &FluxConfig {
        &self.config
    }

    /// The velocity at the noisy latents `hidden_states (B, S, in_channels)`, whose S tokens are patches of 2 × 2
    /// latents. The result is (B, S, out_channels), in the dtype of the weights.
    ///
    /// # Errors
    /// As [`TokenSizes::check`]; [`trainable_candle_core::Error::DType`] if `img_ids` and `txt_ids` have different
    /// dtypes.
    pub fn forward(&self, hidden_states: &Tensor, conditions: FluxConditions<'_>) -> Result<Tensor> {
        let [image_tokens, text_tokens] = self.check(hidden_states, conditions)?;
        let dtype = self.dtype();
        let thousandfold = |x: &Tensor| x.reshape(x.elem_count())?.to_dtype(DType::F32)?.mul_scalar(TIME_SCALE);
        let guidance = conditions.guidance.map(thousandfold).transpose()?;
        let condition = self.time_text_embed.forward(
            &thousandfold(conditions.timestep)?,
            Some(conditions.pooled_projections),
            guidance.as_ref(),
        )?;
        let image = self.x_embedder.forward(&hidden_states.to_dtype(dtype)?)?;
        let text = self.context_embedder.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let angles = self.axes.at(&Tensor::cat(&[conditions.txt_ids, conditions.img_ids], 0)?)?;
        let attention_inputs = AttentionInputs { angles: Some(&angles), mask: None };
        let [image, text] =
            run_double(&self.double_blocks, [image, text], attention_inputs, |_, block| block.modulation(&condition))?;
        let x = Tensor::cat(&[&text, &image], 1)?;
        let x = run_single(&self.single_blocks, x, attention_inputs, |_, block| block.modulation(&condition))?;
        self.output.forward(&x.narrow(1, text_tokens, image_tokens)?, &condition)
    }

    /// Check the inputs, and return the number of image tokens and the number of text tokens.
    fn check(&self, hidden_states: &Tensor, conditions: FluxConditions<'_>) -> Result<[usize; 2]> {
        let FluxConditions { encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance } =
            conditions;
        let sizes = TokenSizes {
            op: Self::CLASS_NAME,
            channels: self.config.in_channels,
            text: self.config.joint_attention_dim,
            pooled: Some(self.config.pooled_projection_dim),
            axes: self.config.axes_dims_rope.len(),
            guidance: self.config.guidance_embeds,
        };
        let pooled_projections = Some(pooled_projections);
        sizes.check(TokenInputs {
            hidden_states,
            encoder_hidden_states,
            pooled_projections,
            timestep,
            guidance,
            img_ids,
            txt_ids,
        })
    }
}

impl Module for FluxTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("time_text_embed", &self.time_text_embed)?;
        visitor.linear("context_embedder", &self.context_embedder)?;
        visitor.linear("x_embedder", &self.x_embedder)?;
        visitor.blocks("transformer_blocks", &self.double_blocks)?;
        visitor.blocks("single_transformer_blocks", &self.single_blocks)?;
        self.output.visit(visitor)
    }
}

impl Architecture for FluxTransformer {
    type Config = FluxConfig;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable = Quantizable {
        blocks: &["transformer_blocks.", "single_transformer_blocks."],
        modulation: &["norm1.linear", "norm1_context.linear", "norm.linear"],
        ..Quantizable::NOTHING
    };

    fn build(config: FluxConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<FluxConfig>) -> Result<FluxConfig> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &FluxConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::NAMES.layout(original)
    }
}

impl Model for FluxTransformer {
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
        let image_tokens = size.height.div_ceil(PATCH) * size.width.div_ceil(PATCH);
        // The layers outside of checkpoints: only blocks are checkpointed. The pairs are the number of values in a
        // layer's input and the number of tokens that the layer is applied to.
        saved.outside(|saved| {
            saved.linear(&self.x_embedder, (image_tokens * self.config.in_channels, image_tokens));
            saved.linear(&self.context_embedder, (size.tokens * self.config.joint_attention_dim, size.tokens));
            self.time_text_embed.saved(saved);
        });
        saved.each(&self.double_blocks, |block, saved| block.saved(image_tokens, size.tokens, saved));
        saved.each(&self.single_blocks, |block, saved| block.saved(image_tokens + size.tokens, saved));
        // This layer counts itself as outside of checkpoints.
        self.output.saved(image_tokens, saved);
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        Arc::new(|layer| keys::NAMES.layer(layer))
    }
}
