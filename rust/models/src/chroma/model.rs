//! Chroma's transformer. It predicts the velocity from the noisy latents (as tokens), the time and the text.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Linear, Module, Quantizable, Visitor, Weights};

use super::approximator::Approximator;
use super::{ChromaConfig, keys};
use crate::layers::joint::{
    AttentionInputs, DoubleBlock, DoubleBlockKind, ModulatedOutput, RopeAxes, SingleBlock, TextLengths, TokenInputs,
    TokenSizes, run_double, run_single,
};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The base θ of the rotary embedding's frequencies. It is a constant in diffusers too.
const THETA: f64 = 10_000.0;
/// The time is multiplied by this number before its sinusoids are computed.
const TIME_SCALE: f64 = 1000.0;
/// The height and width, in latent pixels, of the square that becomes an image token.
const PATCH: usize = 2;

/// Chroma's transformer. It computes the same as diffusers' `ChromaTransformer2DModel` and has the same parameter
/// names. It predicts flow matching's velocity, which is noise − latents.
pub struct ChromaTransformer {
    config: ChromaConfig,
    x_embedder: Linear<Tensor>,
    context_embedder: Linear<Tensor>,
    approximator: Approximator,
    axes: RopeAxes,
    double_blocks: Blocks<DoubleBlock>,
    single_blocks: Blocks<SingleBlock>,
    output: ModulatedOutput,
    lengths: TextLengths,
}

/// The inputs of a forward pass, except the noisy latents.
#[derive(Clone, Copy)]
pub struct ChromaConditions<'a> {
    /// The results of the text encoder for the text tokens, (B, L, joint_attention_dim).
    pub encoder_hidden_states: &'a Tensor,
    /// The time from 0 (clean latents) to 1 (pure noise), of shape (B), (1) or ().
    pub timestep: &'a Tensor,
    /// The positions of the image tokens, (S, axes): 0, row, column.
    pub img_ids: &'a Tensor,
    /// The positions of the text tokens, (L, axes): zeros.
    pub txt_ids: &'a Tensor,
    /// For each sample, the number of text tokens to which tokens attend, (B), at least 1: all tokens of the text and
    /// one padding token. `None` means all L tokens; then attention needs no mask, which saves time.
    pub lengths: Option<&'a Tensor>,
}

impl ChromaTransformer {
    /// The `_class_name` in the model's `config.json`.
    pub const CLASS_NAME: &'static str = "ChromaTransformer2DModel";

    /// A model with the parameters `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the configuration is wrong or the parameters belong to another
    /// model.
    pub fn new(config: ChromaConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, sizes) = (config.inner_dim(), config.block());
        // The blocks get their modulation from the approximator.
        let takes_modulation = true;
        let kind = DoubleBlockKind { takes_modulation, ..DoubleBlockKind::default() };
        let has_bias = true;
        let x_embedder = weights.linear("x_embedder", config.in_channels, dim, has_bias)?;
        let device = x_embedder.weight.device();
        Ok(Self {
            axes: RopeAxes::new(&config.axes_dims_rope, THETA, device)?,
            lengths: TextLengths::new(Self::CLASS_NAME, device)?,
            x_embedder,
            context_embedder: weights.linear("context_embedder", config.joint_attention_dim, dim, has_bias)?,
            approximator: Approximator::new(config.approximator(), &mut weights.pp(APPROXIMATOR))?,
            double_blocks: (0..config.num_layers)
                .map(|i| DoubleBlock::new(sizes, kind, &mut weights.pp(&format!("transformer_blocks.{i}"))))
                .collect::<Result<_>>()?,
            single_blocks: (0..config.num_single_layers)
                .map(|i| {
                    let mut weights = weights.pp(&format!("single_transformer_blocks.{i}"));
                    SingleBlock::new(sizes, takes_modulation, &mut weights)
                })
                .collect::<Result<_>>()?,
            output: ModulatedOutput::with_given_modulation([dim, config.out_channels], sizes.bias, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &ChromaConfig {
        &self.config
    }

    /// The velocity (B, S, out_channels), in the dtype of the weights, for the noisy latents `hidden_states (B, S,
    /// in_channels)`. Each of the S image tokens is a square of 2 × 2 latent pixels.
    ///
    /// # Errors
    /// As [`TokenSizes::check`]; [`trainable_candle_core::Error::Shape`] if the lengths are not (B), or are given for a
    /// text of more than 4096 tokens, [`trainable_candle_core::Error::DType`] if `img_ids` and `txt_ids` have different
    /// dtypes.
    pub fn forward(&self, hidden_states: &Tensor, conditions: ChromaConditions<'_>) -> Result<Tensor> {
        // The numbers of image tokens and of text tokens.
        let [area, length] = self.check(hidden_states, conditions)?;
        let (dtype, batch) = (self.dtype(), hidden_states.dims()[0]);
        let times = conditions.timestep.reshape(conditions.timestep.elem_count())?.to_dtype(DType::F32)?;
        // The modulations (shifts, scales and gates) of all blocks and of the output, which depend only on the time.
        let table = self.approximator.forward(&times.mul_scalar(TIME_SCALE)?)?.of_batch(batch)?;
        let image = self.x_embedder.forward(&hidden_states.to_dtype(dtype)?)?;
        let text = self.context_embedder.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let angles = self.axes.at(&Tensor::cat(&[conditions.txt_ids, conditions.img_ids], 0)?)?;
        // The mask hides the keys of text tokens beyond the lengths. The original code also masks the queries of these
        // tokens. This second mask is not needed, because the results of these queries are not used.
        let mask = conditions.lengths.map(|lengths| self.lengths.mask(lengths, length, area)).transpose()?;
        let attention_inputs = AttentionInputs { angles: Some(&angles), mask: mask.as_ref() };
        let [image, text] =
            run_double(&self.double_blocks, [image, text], attention_inputs, |i, _block| table.double(i))?;
        let x = Tensor::cat(&[&text, &image], 1)?;
        let x = run_single(&self.single_blocks, x, attention_inputs, |i, _block| table.single(i))?;
        let [shift, scale] = table.output()?;
        self.output.modulated(&x.narrow(1, length, area)?, [&shift, &scale])
    }

    /// Check the inputs. Returns the numbers of image tokens and of text tokens.
    fn check(&self, hidden_states: &Tensor, conditions: ChromaConditions<'_>) -> Result<[usize; 2]> {
        let ChromaConditions { encoder_hidden_states, timestep, img_ids, txt_ids, lengths } = conditions;
        let sizes = TokenSizes {
            op: Self::CLASS_NAME,
            channels: self.config.in_channels,
            text: self.config.joint_attention_dim,
            pooled: None, // Chroma takes neither a pooled text embedding nor a guidance scale.
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

/// The approximator's name in the model.
const APPROXIMATOR: &str = "distilled_guidance_layer";

impl Module for ChromaTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module(APPROXIMATOR, &self.approximator)?;
        visitor.linear("context_embedder", &self.context_embedder)?;
        visitor.linear("x_embedder", &self.x_embedder)?;
        visitor.blocks("transformer_blocks", &self.double_blocks)?;
        visitor.blocks("single_transformer_blocks", &self.single_blocks)?;
        self.output.visit(visitor)
    }
}

impl Architecture for ChromaTransformer {
    type Config = ChromaConfig;

    const KIND: &'static ModelKind = &super::KIND;

    // All linear layers in the blocks. The other lists are empty: `unquantized`, because no layer in a block keeps its
    // dtype; `multiplied`, because with 8-bit products all these layers are quantized too; `rows`, because no matrix
    // outside of the blocks is quantized; `modulation`, because the approximator computes it, not a layer of a block.
    const QUANTIZABLE: Quantizable =
        Quantizable { blocks: &["transformer_blocks.", "single_transformer_blocks."], ..Quantizable::NOTHING };

    fn build(config: ChromaConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<ChromaConfig>) -> Result<ChromaConfig> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &ChromaConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::NAMES.layout(original)
    }
}

impl Model for ChromaTransformer {
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
        // These layers run outside of checkpoints. `size.tokens` is the number of text tokens.
        saved.outside(|saved| {
            self.approximator.saved(saved);
            // `linear` takes a layer, the number of its input values, and the number of tokens.
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
