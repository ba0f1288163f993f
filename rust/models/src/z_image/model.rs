//! Z-Image's transformer. It predicts the velocity (latents − noise) from the noisy latents, the time and the text.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::ops::norm::layer_norm;
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Blocks, Init, Linear, Module, Quantizable, RmsNorm, Visitor, Weights};

use super::block::Block;
use super::config::PATCH;
use super::positions::{Extent, MULTIPLE, Positions};
use super::{ZImageConfig, keys};
use crate::layers::joint::{AttentionInputs, EPS, Rope};
use crate::layers::{Sinusoids, TimestepEmbedding};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The time is multiplied by this before its sinusoids are computed.
const TIME_SCALE: f64 = 1000.0;
/// The number of sinusoids of the time, and the number of hidden features of the time's embedding.
const TIME_SIZES: [usize; 2] = [256, 1024];

/// Z-Image's transformer, with the results and the parameter names of diffusers' `ZImageTransformer2DModel`. Its time
/// goes from 0 (noise) to 1 (clean), and it predicts the velocity along this time: latents − noise. This library's
/// other flow models count the time from clean to noise and predict noise − latents.
pub struct ZImageTransformer {
    config: ZImageConfig,
    x_embedder: Linear<Tensor>,
    t_sinusoids: Sinusoids,
    t_embedder: TimestepEmbedding,
    cap_norm: RmsNorm,
    cap_embedder: Linear<Tensor>,
    /// The padding tokens of the image and of the text, (1, D) each. D is `dim` of the configuration.
    pads: [Tensor; 2],
    positions: Positions,
    noise_refiner: Blocks<Block>,
    context_refiner: Blocks<Block>,
    layers: Blocks<Block>,
    output_modulation: Linear<Tensor>,
    output: Linear<Tensor>,
}

/// The inputs of one call except the noisy latents.
#[derive(Clone, Copy)]
pub struct ZImageConditions<'a> {
    /// The features of the text's tokens, (B, L, cap_feat_dim).
    pub encoder_hidden_states: &'a Tensor,
    /// The time from 0 (noise) to 1 (clean), of shape (B), (1) or ().
    pub timestep: &'a Tensor,
    /// The number of tokens of each text without its padding, (B), at least 1 each. Tokens after these are not read.
    /// With None, no text has padding.
    pub lengths: Option<&'a Tensor>,
    /// Whether the length of every text equals L after both are rounded up to a multiple of 32 tokens. Attention then
    /// needs no mask. The value is not checked, because the check would wait for a GPU.
    pub rows_are_full: bool,
}

impl ZImageTransformer {
    /// The `_class_name` in its `config.json`.
    pub const CLASS_NAME: &'static str = "ZImageTransformer2DModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: ZImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (dim, condition, patch) = (config.dim, config.condition_dim(), PATCH * PATCH * config.in_channels);
        let mut blocks = |name: &str, count: usize, is_modulated: bool| {
            let block = |i| Block::new(&config, is_modulated, &mut weights.pp(&format!("{name}.{i}")));
            (0..count).map(block).collect::<Result<Blocks<_>>>()
        };
        let refiners = config.n_refiner_layers;
        let noise_refiner = blocks("noise_refiner", refiners, true)?;
        let context_refiner = blocks("context_refiner", refiners, false)?;
        let layers = blocks("layers", config.n_layers, true)?;
        let [sinusoids, hidden] = TIME_SIZES;
        let sizes = [sinusoids, hidden, condition];
        let has_bias = true;
        let t_embedder = TimestepEmbedding::named(TIME_LAYERS, sizes, has_bias, &mut weights.pp("t_embedder"))?;
        let mut pad = |name| weights.get(name, (1, dim), Init::Normal(0.02));
        Ok(Self {
            pads: [pad("x_pad_token")?, pad("cap_pad_token")?],
            x_embedder: weights.linear(X_EMBEDDER, patch, dim, has_bias)?,
            t_sinusoids: Sinusoids::new(sinusoids, t_embedder.device())?,
            positions: Positions::new(&config, t_embedder.device())?,
            t_embedder,
            cap_norm: weights.rms_norm("cap_embedder.0", config.cap_feat_dim, config.norm_eps)?,
            cap_embedder: weights.linear("cap_embedder.1", config.cap_feat_dim, dim, has_bias)?,
            noise_refiner,
            context_refiner,
            layers,
            output_modulation: weights.linear(OUTPUT_MODULATION, condition, dim, has_bias)?,
            output: weights.linear(OUTPUT, dim, patch, has_bias)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &ZImageConfig {
        &self.config
    }

    /// Predicts the velocity along the model's time, latents − noise, at noisy latents `hidden_states (B, C, H, W)`; H
    /// and W must be even. The result has the shape of `hidden_states` and the dtype of the weights.
    ///
    /// # Errors
    /// [`Error::Shape`] if the inputs do not fit the configuration or one another, or the image or the text has no
    /// token; [`Error::DType`] if `hidden_states` is not floating-point.
    pub fn forward(&self, hidden_states: &Tensor, conditions: ZImageConditions<'_>) -> Result<Tensor> {
        let extent = self.check(hidden_states, conditions)?;
        let (dtype, batch) = (self.dtype(), hidden_states.dims()[0]);
        let times = conditions.timestep.reshape(conditions.timestep.elem_count())?.to_dtype(DType::F32)?;
        let condition = self.t_embedder.forward(&self.t_sinusoids.forward(&times.mul_scalar(TIME_SCALE)?)?)?;

        let image = self.x_embedder.forward(&patches(&hidden_states.to_dtype(dtype)?)?)?;
        let image = padded(&image, &self.pads[0])?;
        let text = self.cap_norm.forward(&conditions.encoder_hidden_states.to_dtype(dtype)?)?;
        let mut text = padded(&self.cap_embedder.forward(&text)?, &self.pads[1])?;
        // From here on, L is `extent.text`: the L of `encoder_hidden_states`, rounded up to a multiple of 32. `shown` is
        // the mask (B, L) of the text tokens that attention reads: a text's own tokens, and its padding up to a
        // multiple of 32. None if attention reads all L tokens.
        let mut shown = None;
        if let Some(lengths) = conditions.lengths {
            // After a text's last token, the model's padding token replaces the embeddings of the padding. The mask
            // `own_tokens` is 1 up to the last token.
            text = Tensor::select(&self.positions.own_tokens(lengths, extent.text)?, &text, &self.pads[1])?;
            let needs_mask = !conditions.rows_are_full;
            shown = needs_mask.then(|| self.positions.shown(lengths, extent.text)).transpose()?;
        }
        // The image's position follows that of the last text token in `shown`.
        let angles = self.positions.angles(extent, shown.as_ref())?;
        // The order of the tokens is: image, padding of the image, text.
        let image_tokens = extent.padded_area();
        let [image_angles, text_angles] = [angles.narrow(0, image_tokens)?, angles.narrow(image_tokens, extent.text)?];
        // (B, 1, 1, L), to be broadcast over heads and queries.
        let shown_keys = shown.as_ref().map(|shown| shown.unsqueeze(1)?.unsqueeze(1)).transpose()?;
        let image = run(&self.noise_refiner, image, Some(&condition), &image_angles, None)?;
        let text = run(&self.context_refiner, text, None, &text_angles, shown_keys.as_ref())?;
        // For the layers that attend to image and text: (B, 1, 1, image tokens + L).
        let mask = shown.as_ref().map(|shown| self.positions.mask(extent, shown)).transpose()?;
        let both = Tensor::cat(&[&image, &text], 1)?;
        let both = run(&self.layers, both, Some(&condition), &angles, mask.as_ref())?;

        let scale = self.output_modulation.forward(&condition.silu()?)?.add_scalar(1.0)?.unsqueeze(1)?;
        let (norm_dims, weight, bias) = (1, None, None);
        let normed = layer_norm(&both.narrow(1, 0, extent.area())?, norm_dims, weight, bias, EPS)?;
        let Extent { height, width, .. } = extent;
        // The output layer orders the values of a patch as (row, column, channel).
        self.output
            .forward(&normed.mul(&scale)?)?
            .reshape(vec![batch, height, width, PATCH, PATCH, self.config.in_channels])?
            .permute(&[0, 5, 1, 3, 2, 4])?
            .reshape((batch, self.config.in_channels, height * PATCH, width * PATCH))
    }

    /// Checks the inputs and returns the numbers of their tokens.
    fn check(&self, hidden_states: &Tensor, conditions: ZImageConditions<'_>) -> Result<Extent> {
        let misfit = |name: &str, found: &Tensor, expected: String| {
            Err(Error::shape(Self::CLASS_NAME, format!("{name} has shape {:?}, expected {expected}", found.dims())))
        };
        let channels = self.config.in_channels;
        let expected = || format!("(B, {channels}, H, W), H and W positive multiples of {PATCH}");
        let &[batch, c, height, width] = hidden_states.dims() else {
            return misfit("hidden_states", hidden_states, expected());
        };
        let is_side = |side: usize| side > 0 && side.is_multiple_of(PATCH);
        if c != channels || !is_side(height) || !is_side(width) {
            return misfit("hidden_states", hidden_states, expected());
        }
        if !is_float(hidden_states.dtype()) {
            let found = hidden_states.dtype().as_str();
            let message = format!("hidden_states is {found}, expected floating-point latents");
            return Err(Error::dtype(Self::CLASS_NAME, message));
        }
        let ZImageConditions { encoder_hidden_states, timestep, lengths, .. } = conditions;
        let features = self.config.cap_feat_dim;
        let length = match *encoder_hidden_states.dims() {
            [b, length, f] if b == batch && f == features && length > 0 => length,
            _ => {
                let expected = format!("({batch}, L, {features}) with at least one token");
                return misfit("encoder_hidden_states", encoder_hidden_states, expected);
            }
        };
        if !matches!(*timestep.dims(), [] | [1]) && timestep.dims() != [batch] {
            return misfit("timestep", timestep, format!("({batch},), (1,) or ()"));
        }
        if let Some(lengths) = lengths.filter(|lengths| lengths.dims() != [batch]) {
            return misfit("lengths", lengths, format!("({batch},)"));
        }
        let extent = Extent { height: height / PATCH, width: width / PATCH, text: length.next_multiple_of(MULTIPLE) };
        self.positions.check(extent)?;
        Ok(extent)
    }
}

/// The layers of the time's embedding.
const TIME_LAYERS: [&str; 2] = ["mlp.0", "mlp.2"];
/// The layer that embeds the image's patches. `2-1` stands for patches of 2 × 2 latents in 1 frame.
const X_EMBEDDER: &str = "all_x_embedder.2-1";
/// The last layer.
const OUTPUT: &str = "all_final_layer.2-1.linear";
/// The layer that computes the scale before the last layer from the condition.
const OUTPUT_MODULATION: &str = "all_final_layer.2-1.adaLN_modulation.1";

/// Divides latents into squares of 2 × 2, row by row: (B, C, H, W) → (B, H · W / 4, 4 · C). The values of a square have
/// the order (row, column, channel).
fn patches(latents: &Tensor) -> Result<Tensor> {
    let &[batch, channels, height, width] = latents.dims() else { unreachable!("the caller checked the rank") };
    let (rows, columns) = (height / PATCH, width / PATCH);
    latents.reshape(vec![batch, channels, rows, PATCH, columns, PATCH])?.permute(&[0, 2, 4, 3, 5, 1])?.reshape((
        batch,
        rows * columns,
        PATCH * PATCH * channels,
    ))
}

/// Pads `tokens (B, S, D)` with copies of `pad (1, D)` to a multiple of 32 tokens.
fn padded(tokens: &Tensor, pad: &Tensor) -> Result<Tensor> {
    let &[batch, count, dim] = tokens.dims() else { unreachable!("embedded tokens have three dimensions") };
    let missing = count.next_multiple_of(MULTIPLE) - count;
    if missing == 0 {
        return Ok(tokens.clone());
    }
    Tensor::cat(&[tokens, &pad.unsqueeze(0)?.broadcast_as((batch, missing, dim))?], 1)
}

/// Runs all `blocks` on `x`, one after the other. `condition` is None if the blocks are not modulated.
fn run(
    blocks: &Blocks<Block>,
    mut x: Tensor,
    condition: Option<&Tensor>,
    angles: &Rope,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    for (i, block) in blocks.iter().enumerate() {
        let modulation = condition.map(|condition| block.modulation(condition)).transpose()?.flatten();
        let is_modulated = modulation.is_some();
        let attention_inputs = AttentionInputs { angles: Some(angles), mask };
        let inputs = [&x].into_iter().chain(&modulation).chain(attention_inputs.tensors());
        x = blocks.run_one(i, &inputs.collect::<Vec<_>>(), move |block, inputs| {
            let [x, rest @ ..] = inputs else { unreachable!("an input at least") };
            let (modulation, angles_and_mask) = rest.split_at(usize::from(is_modulated));
            let has_angles = true;
            AttentionInputs::with_tensors(has_angles, angles_and_mask, |attention_inputs| {
                block.forward(x, modulation.first(), attention_inputs)
            })
        })?;
    }
    Ok(x)
}

impl Module for ZImageTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.tensor("x_pad_token", &self.pads[0])?;
        visitor.tensor("cap_pad_token", &self.pads[1])?;
        visitor.linear(X_EMBEDDER, &self.x_embedder)?;
        visitor.module("t_embedder", &self.t_embedder)?;
        visitor.module("cap_embedder.0", &self.cap_norm)?;
        visitor.linear("cap_embedder.1", &self.cap_embedder)?;
        visitor.blocks("noise_refiner", &self.noise_refiner)?;
        visitor.blocks("context_refiner", &self.context_refiner)?;
        visitor.blocks("layers", &self.layers)?;
        visitor.linear(OUTPUT_MODULATION, &self.output_modulation)?;
        visitor.linear(OUTPUT, &self.output)
    }
}

impl Architecture for ZImageTransformer {
    type Config = ZImageConfig;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable = Quantizable {
        blocks: &["layers.", "noise_refiner.", "context_refiner."],
        unquantized: &["adaLN_modulation"],
        ..Quantizable::NOTHING
    };

    fn build(config: ZImageConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<ZImageConfig>) -> Result<ZImageConfig> {
        keys::deduce(files, original, known)
    }

    fn parameter_layout(
        _config: &ZImageConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original)
    }
}

impl Model for ZImageTransformer {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.output.weight.dtype()
    }

    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        let (height, width) = (size.height.div_ceil(PATCH), size.width.div_ceil(PATCH));
        let extent = Extent { height, width, text: size.tokens.next_multiple_of(MULTIPLE) };
        let (area, dim) = (extent.area(), self.config.dim);
        // `outside` counts layers outside of blocks, and `each` counts blocks, which checkpoints may recompute.
        // A linear layer is counted with a pair: all input values of its tokens, and the number of the tokens.
        saved.outside(|saved| {
            self.t_embedder.saved(saved);
            saved.linear(&self.x_embedder, (area * self.x_embedder.in_features(), area));
        });
        saved.each(&self.noise_refiner, |block, saved| block.saved(extent.padded_area(), saved));
        saved.outside(|saved| {
            saved.linear(&self.cap_embedder, (size.tokens * self.config.cap_feat_dim, size.tokens));
        });
        saved.each(&self.context_refiner, |block, saved| block.saved(extent.text, saved));
        saved.each(&self.layers, |block, saved| block.saved(extent.padded_area() + extent.text, saved));
        saved.outside(|saved| {
            saved.linear(&self.output_modulation, (self.output_modulation.in_features(), 1));
            // The tape keeps the input of the norm, and the norm's result, which the scale multiplies.
            saved.keep(2 * area * dim);
            saved.linear(&self.output, (area * dim, area));
        });
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        Arc::new(keys::original_layer)
    }
}
