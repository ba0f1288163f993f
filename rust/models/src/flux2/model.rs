//! The transformer of FLUX.2. It predicts the velocity from noisy latents (as tokens), time, text and guidance scale.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Linear, Module, Quantizable, Visitor, Weights};

use super::single::FusedBlock;
use super::{Flux2Config, keys};
use crate::layers::joint::{
    AttentionInputs, ConditionSizes, DoubleBlock, DoubleBlockKind, FeedForwardKind, ModulatedOutput, Rope, RopeAxes,
    TimeTextEmbedding, TokenInputs, TokenSizes, run_double,
};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The factor by which the time and the guidance scale are multiplied before their sinusoids are computed.
const TIME_SCALE: f64 = 1000.0;
/// Number of latents along one side of the square patch that becomes a token.
const PATCH: usize = 2;

/// FLUX.2's transformer, with the results and the parameter names of diffusers' `Flux2Transformer2DModel`. It predicts
/// the velocity of flow matching, `noise - latents`.
pub struct Flux2Transformer {
    config: Flux2Config,
    x_embedder: Linear<Tensor>,
    context_embedder: Linear<Tensor>,
    time_guidance_embed: TimeTextEmbedding,
    /// The layers that compute the modulation: one for the image and one for the text in double-stream blocks, and
    /// one for single-stream blocks. All blocks of a kind share their modulation.
    modulations: [Linear<Tensor>; 3],
    /// Computes the rotary embedding's angles from the tokens' positions.
    axes: RopeAxes,
    double_blocks: Blocks<DoubleBlock>,
    single_blocks: Blocks<FusedBlock>,
    output: ModulatedOutput,
}

/// The layers that compute the modulation: the name of each, and how many shifts, scales and gates it computes in all.
const MODULATIONS: [(&str, usize); 3] = [
    ("double_stream_modulation_img.linear", 6),
    ("double_stream_modulation_txt.linear", 6),
    ("single_stream_modulation.linear", 3),
];

/// The inputs of one forward pass except the noisy latents, for B samples of S image tokens and L text tokens.
#[derive(Clone, Copy)]
pub struct Flux2Conditions<'a> {
    /// The text encoder's tokens, (B, L, joint_attention_dim).
    pub encoder_hidden_states: &'a Tensor,
    /// The time from 0 (clean) to 1 (noise): (B), (1) or a scalar.
    pub timestep: &'a Tensor,
    /// Positions of the image's tokens, (S, axes): 0, row, column, 0.
    pub img_ids: &'a Tensor,
    /// Positions of the text's tokens, (L, axes): 0, 0, 0, index.
    pub txt_ids: &'a Tensor,
    /// The guidance scale: (B), (1) or a scalar; None for a model that takes no guidance scale.
    pub guidance: Option<&'a Tensor>,
}

impl Flux2Transformer {
    /// The `_class_name` in its `config.json`.
    pub const CLASS_NAME: &'static str = "Flux2Transformer2DModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the configuration is wrong; as [`Weights::get`].
    pub fn new(config: Flux2Config, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, sizes, bias) = (config.inner_dim(), config.block(), false);
        let kind = DoubleBlockKind {
            takes_modulation: true,
            feed_forward: FeedForwardKind::SwiGlu,
            ..DoubleBlockKind::default()
        };
        let x_embedder = weights.linear("x_embedder", config.in_channels, dim, bias)?;
        let condition_sizes = ConditionSizes { dim, pooled: None, guidance: config.guidance_embeds, bias };
        let mut modulation_layer = |index: usize| {
            let (name, parts) = MODULATIONS[index];
            weights.linear(name, dim, parts * dim, bias)
        };
        Ok(Self {
            modulations: [modulation_layer(0)?, modulation_layer(1)?, modulation_layer(2)?],
            axes: RopeAxes::new(&config.axes_dims_rope, config.rope_theta, x_embedder.weight.device())?,
            x_embedder,
            context_embedder: weights.linear("context_embedder", config.joint_attention_dim, dim, bias)?,
            time_guidance_embed: TimeTextEmbedding::new(condition_sizes, &mut weights.pp("time_guidance_embed"))?,
            double_blocks: (0..config.num_layers)
                .map(|i| DoubleBlock::new(sizes, kind, &mut weights.pp(&format!("transformer_blocks.{i}"))))
                .collect::<Result<_>>()?,
            single_blocks: (0..config.num_single_layers)
                .map(|i| FusedBlock::new(sizes, &mut weights.pp(&format!("single_transformer_blocks.{i}"))))
                .collect::<Result<_>>()?,
            output: ModulatedOutput::new([dim, config.out_channels], bias, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &Flux2Config {
        &self.config
    }

    /// The velocity at the noisy latents `hidden_states (B, S, in_channels)`, whose S tokens are patches of 2 × 2
    /// latents. The result is (B, S, out_channels), in the dtype of the weights.
    ///
    /// # Errors
    /// As [`TokenSizes::check`]; [`trainable_candle_core::Error::DType`] if `img_ids` and `txt_ids` have different
    /// dtypes.
    pub fn forward(&self, hidden_states: &Tensor, conditions: Flux2Conditions<'_>) -> Result<Tensor> {
        let [area, length] = self.check(hidden_states, conditions)?;
        let dtype = self.dtype();
        let thousandfold = |x: &Tensor| x.reshape(x.elem_count())?.to_dtype(DType::F32)?.mul_scalar(TIME_SCALE);
        let guidance = conditions.guidance.map(thousandfold).transpose()?;
        // `timestep` may be one time for all samples, but the blocks need a modulation for each sample.
        let times = thousandfold(conditions.timestep)?.broadcast_as(hidden_states.dims()[0])?;
        let pooled_text = None; // FLUX.2 takes no pooled text embedding.
        let condition = self.time_guidance_embed.forward(&times, pooled_text, guidance.as_ref())?;
        let [image_layer, text_layer, single_layer] = &self.modulations;
        let (of_image, of_text) = (image_layer.forward(&condition)?, text_layer.forward(&condition)?);
        let of_single = single_layer.forward(&condition)?;
        let image = self.x_embedder.forward(&hidden_states.to_dtype(dtype)?)?;
        let text = self.context_embedder.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let angles = self.axes.at(&Tensor::cat(&[conditions.txt_ids, conditions.img_ids], 0)?)?;
        let attention_inputs = AttentionInputs { angles: Some(&angles), mask: None };
        let shared_modulation = |_, _: &DoubleBlock| Ok([of_image.clone(), of_text.clone()]);
        let [image, text] = run_double(&self.double_blocks, [image, text], attention_inputs, shared_modulation)?;
        let x = Tensor::cat(&[&text, &image], 1)?;
        let x = self.single_blocks.run(&x, &[&of_single, &angles.cos, &angles.sin], |block, x, shared| {
            let [modulation, cos, sin] = shared else { unreachable!("three conditions") };
            block.forward(x, modulation, &Rope { cos: cos.clone(), sin: sin.clone() })
        })?;
        self.output.forward(&x.narrow(1, length, area)?, &condition)
    }

    /// Check the inputs, and return the number of image tokens and the number of text tokens.
    fn check(&self, hidden_states: &Tensor, conditions: Flux2Conditions<'_>) -> Result<[usize; 2]> {
        let Flux2Conditions { encoder_hidden_states, timestep, img_ids, txt_ids, guidance } = conditions;
        let sizes = TokenSizes {
            op: Self::CLASS_NAME,
            channels: self.config.in_channels,
            text: self.config.joint_attention_dim,
            pooled: None,
            axes: self.config.axes_dims_rope.len(),
            guidance: self.config.guidance_embeds,
        };
        sizes.check(TokenInputs {
            hidden_states,
            encoder_hidden_states,
            pooled_projections: None,
            timestep,
            guidance,
            img_ids,
            txt_ids,
        })
    }
}

impl Module for Flux2Transformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("time_guidance_embed", &self.time_guidance_embed)?;
        for ((name, _), layer) in MODULATIONS.iter().zip(&self.modulations) {
            visitor.linear(name, layer)?;
        }
        visitor.linear("x_embedder", &self.x_embedder)?;
        visitor.linear("context_embedder", &self.context_embedder)?;
        visitor.blocks("transformer_blocks", &self.double_blocks)?;
        visitor.blocks("single_transformer_blocks", &self.single_blocks)?;
        self.output.visit(visitor)
    }
}

impl Architecture for Flux2Transformer {
    type Config = Flux2Config;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable =
        Quantizable { blocks: &["transformer_blocks.", "single_transformer_blocks."], ..Quantizable::NOTHING };

    fn build(config: Flux2Config, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<Flux2Config>) -> Result<Flux2Config> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &Flux2Config,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::NAMES.layout(original)
    }
}

impl Model for Flux2Transformer {
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
        // The number of image tokens.
        let area = size.height.div_ceil(PATCH) * size.width.div_ceil(PATCH);
        let dim = self.config.inner_dim();
        // The pairs are the number of values in a layer's input and the number of tokens that the layer is applied to.
        // `outside`: these layers run once, outside of the blocks. So does `output`, which calls `outside` itself.
        saved.outside(|saved| {
            self.time_guidance_embed.saved(saved);
            self.modulations.iter().for_each(|layer| saved.linear(layer, (dim, 1)));
            saved.linear(&self.x_embedder, (area * self.config.in_channels, area));
            saved.linear(&self.context_embedder, (size.tokens * self.config.joint_attention_dim, size.tokens));
        });
        saved.each(&self.double_blocks, |block, saved| block.saved(area, size.tokens, saved));
        saved.each(&self.single_blocks, |block, saved| block.saved(area + size.tokens, saved));
        self.output.saved(area, saved);
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        Arc::new(|layer| keys::NAMES.layer(layer))
    }
}
