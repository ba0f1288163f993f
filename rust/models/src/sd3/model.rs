//! The transformer of Stable Diffusion 3 and 3.5, which predicts the velocity from noisy latents, a time and a text.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Conv2d, Init, Linear, Module, Quantizable, Visitor, Weights};

use super::positions::Positions;
use super::{SD3Config, keys};
use crate::layers::joint::{
    AttentionInputs, ConditionSizes, DoubleBlock, DoubleBlockKind, ModulatedOutput, TimeTextEmbedding, run_double,
};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// SD3's and SD3.5's transformer, with the results and the parameter names of diffusers' `SD3Transformer2DModel`. It
/// predicts the velocity of flow matching: noise − latents.
pub struct SD3Transformer {
    config: SD3Config,
    patch_embed: Conv2d<Tensor>,
    positions: Positions,
    time_text_embed: TimeTextEmbedding,
    context_embedder: Linear<Tensor>,
    blocks: Blocks<DoubleBlock>,
    output: ModulatedOutput,
}

/// The inputs of one call except the noisy latents, for B images with L text tokens each.
#[derive(Clone, Copy)]
pub struct SD3Conditions<'a> {
    /// The features of the text tokens, (B, L, `joint_attention_dim`).
    pub encoder_hidden_states: &'a Tensor,
    /// The pooled features of the text, (B, `pooled_projection_dim`).
    pub pooled_projections: &'a Tensor,
    /// The time from 0 (clean) to 1000 (noise), of shape (B), (1) or ().
    pub timestep: &'a Tensor,
}

impl SD3Transformer {
    /// The `_class_name` in the model's `config.json`.
    pub const CLASS_NAME: &'static str = "SD3Transformer2DModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: SD3Config, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, patch, side) = (config.inner_dim(), config.patch_size, config.pos_embed_max_size);
        let kind = |i: usize| DoubleBlockKind {
            // A second attention, among image tokens alone.
            dual: config.dual_attention_layers.contains(&i),
            // No layer reads the text after the last block.
            image_only: i + 1 == config.num_layers,
            ..DoubleBlockKind::default()
        };
        // All layers have biases.
        let bias = true;
        let options = Conv2dOptions { stride: [patch; 2], ..Conv2dOptions::default() };
        let patch_embed = weights.conv2d("pos_embed.proj", config.in_channels, dim, [patch; 2], options, bias)?;
        // Files hold sines and cosines. A model without files gets random values.
        let table = weights.get("pos_embed.pos_embed", (1, side * side, dim), Init::Normal(0.02))?;
        let sizes = ConditionSizes { dim, pooled: Some(config.pooled_projection_dim), guidance: false, bias };
        Ok(Self {
            positions: Positions::new(&table, side, patch_embed.weight.device())?,
            patch_embed,
            time_text_embed: TimeTextEmbedding::new(sizes, &mut weights.pp("time_text_embed"))?,
            context_embedder: weights.linear("context_embedder", config.joint_attention_dim, dim, bias)?,
            blocks: (0..config.num_layers)
                .map(|i| DoubleBlock::new(config.block(), kind(i), &mut weights.pp(&format!("transformer_blocks.{i}"))))
                .collect::<Result<_>>()?,
            output: ModulatedOutput::new([dim, patch * patch * config.out_channels], bias, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &SD3Config {
        &self.config
    }

    /// The velocity at noisy latents `hidden_states (B, C, H, W)`; H and W are multiples of the patch size. The result
    /// is (B, `out_channels`, H, W) in the dtype of the weights.
    ///
    /// # Errors
    /// [`Error::Shape`] if the inputs do not fit the configuration or one another, the image or the text has no token,
    /// or the image has more tokens than the table of positions; [`Error::DType`] if `hidden_states` is not
    /// floating-point.
    pub fn forward(&self, hidden_states: &Tensor, conditions: SD3Conditions<'_>) -> Result<Tensor> {
        // Height and width in tokens.
        let [batch, height, width] = self.check(hidden_states, conditions)?;
        let (dtype, dim) = (self.dtype(), self.config.inner_dim());
        let patches = self.patch_embed.forward(&hidden_states.to_dtype(dtype)?.permute(&[0, 2, 3, 1])?)?;
        let tokens = patches.reshape((batch, height * width, dim))?;
        // An image takes the positions in the middle of the table, which is square.
        let image = tokens.add(&self.positions.middle(height, width)?)?;
        let text = self.context_embedder.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let times = conditions.timestep.reshape(conditions.timestep.elem_count())?;
        let guidance = None;
        let condition = self.time_text_embed.forward(&times, Some(conditions.pooled_projections), guidance)?;
        let modulation = |_, block: &DoubleBlock| block.modulation(&condition);
        let [image, _] = run_double(&self.blocks, [image, text], AttentionInputs::default(), modulation)?;
        let patch = self.config.patch_size;
        // The output layer orders the values of a patch as (row, column, channel).
        self.output
            .forward(&image, &condition)?
            .reshape(vec![batch, height, width, patch, patch, self.config.out_channels])?
            .permute(&[0, 5, 1, 3, 2, 4])?
            .reshape((batch, self.config.out_channels, height * patch, width * patch))
    }

    /// Check the inputs; returns the batch size, and the height and width in tokens.
    fn check(&self, hidden_states: &Tensor, conditions: SD3Conditions<'_>) -> Result<[usize; 3]> {
        let misfit = |name: &str, found: &Tensor, expected: String| {
            Err(Error::shape(Self::CLASS_NAME, format!("{name} has shape {:?}, expected {expected}", found.dims())))
        };
        let (channels, patch) = (self.config.in_channels, self.config.patch_size);
        let &[batch, c, height, width] = hidden_states.dims() else {
            return misfit("hidden_states", hidden_states, format!("(B, {channels}, H, W)"));
        };
        if c != channels || height == 0 || width == 0 || height % patch != 0 || width % patch != 0 {
            let expected = format!("(B, {channels}, H, W), H and W positive multiples of {patch}");
            return misfit("hidden_states", hidden_states, expected);
        }
        if !is_float(hidden_states.dtype()) {
            let found = hidden_states.dtype().as_str();
            return Err(Error::dtype(
                Self::CLASS_NAME,
                format!("hidden_states is {found}, expected floating-point latents"),
            ));
        }
        let SD3Conditions { encoder_hidden_states, pooled_projections, timestep } = conditions;
        let (text_dim, pooled_dim) = (self.config.joint_attention_dim, self.config.pooled_projection_dim);
        if !matches!(*encoder_hidden_states.dims(), [b, length, w] if b == batch && w == text_dim && length > 0) {
            let expected = format!("({batch}, L, {text_dim}) with at least one token");
            return misfit("encoder_hidden_states", encoder_hidden_states, expected);
        }
        if pooled_projections.dims() != [batch, pooled_dim] {
            return misfit("pooled_projections", pooled_projections, format!("({batch}, {pooled_dim})"));
        }
        if !matches!(*timestep.dims(), [] | [1]) && timestep.dims() != [batch] {
            return misfit("timestep", timestep, format!("({batch},), (1,) or ()"));
        }
        Ok([batch, height / patch, width / patch])
    }
}

impl Module for SD3Transformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("pos_embed.proj", &self.patch_embed)?;
        visitor.tensor("pos_embed.pos_embed", &self.positions.table)?;
        visitor.module("time_text_embed", &self.time_text_embed)?;
        visitor.linear("context_embedder", &self.context_embedder)?;
        visitor.blocks("transformer_blocks", &self.blocks)?;
        self.output.visit(visitor)
    }
}

impl Architecture for SD3Transformer {
    type Config = SD3Config;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable = Quantizable {
        blocks: &["transformer_blocks."],
        modulation: &["norm1.linear", "norm1_context.linear"],
        ..Quantizable::NOTHING
    };

    fn build(config: SD3Config, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<SD3Config>) -> Result<SD3Config> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        config: &SD3Config,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original, config)
    }
}

impl Model for SD3Transformer {
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
        let patch = self.config.patch_size;
        let image_tokens = size.height.div_ceil(patch) * size.width.div_ceil(patch);
        // Pairs are the number of a layer's input values and the number of tokens. `outside` is outside of checkpoints.
        saved.outside(|saved| {
            saved.conv(&self.patch_embed, (size.height * size.width * self.config.in_channels, image_tokens));
            saved.linear(&self.context_embedder, (size.tokens * self.config.joint_attention_dim, size.tokens));
            self.time_text_embed.saved(saved);
        });
        saved.each(&self.blocks, |block, saved| block.saved(image_tokens, size.tokens, saved));
        self.output.saved(image_tokens, saved);
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        // The last block's text norm has a form of its own in original files.
        let last = self.config.num_layers.saturating_sub(1);
        Arc::new(move |layer| keys::original_layer(layer, last))
    }
}
