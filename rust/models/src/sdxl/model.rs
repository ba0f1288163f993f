//! The UNet, which computes a prediction from noisy latents, a time, a text and image sizes.

use std::sync::Arc;

use serde_json::{Map, Value};
use trainable_candle_core::raw::is_float;
use trainable_candle_core::{DType, Error, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_io::adapter_file::OriginalNames;
use trainable_candle_nn::{Conv2d, GroupNorm, Module, Quantizable, Visitor, Weights};

use super::blocks::{Conditions, DownBlock, MidBlock, UpBlock};
use super::config::TIME_IDS;
use super::{UNetConfig, keys};
use crate::layers::{Sinusoids, TimestepEmbedding, conv3x3};
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Key, Layout};
use crate::registry::{Model, ModelKind};
use crate::saved::{SampleSize, Saved};

/// The model's name in errors.
const OP: &str = "SDXLUNet";

/// SDXL's UNet (Podell et al. 2023, arXiv:2307.01952), with the results and the parameter names of diffusers'
/// `UNet2DConditionModel`.
pub struct SDXLUNet {
    config: UNetConfig,
    conv_in: Conv2d<Tensor>,
    time_sinusoids: Sinusoids,
    time_embedding: TimestepEmbedding,
    size_sinusoids: Sinusoids,
    add_embedding: TimestepEmbedding,
    down_blocks: Vec<DownBlock>,
    mid_block: MidBlock,
    up_blocks: Vec<UpBlock>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d<Tensor>,
}

/// The inputs of one call except the noisy latents and the time, for B images with L text tokens each.
#[derive(Clone, Copy)]
pub struct UNetConditions<'a> {
    /// The features of the text tokens, (B, L, `cross_attention_dim`).
    pub encoder_hidden_states: &'a Tensor,
    /// The pooled features of the text, (B, [`pooled_dim`](UNetConfig::pooled_dim)).
    pub text_embeds: &'a Tensor,
    /// In pixels, (B, 6): original height and width, top and left of the crop, target height and width.
    pub time_ids: &'a Tensor,
}

impl SDXLUNet {
    /// The `_class_name` in the model's `config.json`.
    pub const CLASS_NAME: &'static str = "UNet2DConditionModel";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: UNetConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let (levels, first_width) = (config.block_out_channels.len(), config.block_out_channels[0]);
        let time_dim = config.time_embed_dim();
        let time_embedding = TimestepEmbedding::new(first_width, time_dim, &mut weights.pp("time_embedding"))?;
        let device = time_embedding.device().clone();
        Ok(Self {
            conv_in: conv3x3("conv_in", config.in_channels, first_width, weights)?,
            time_sinusoids: Sinusoids::new(first_width, &device)?,
            time_embedding,
            size_sinusoids: Sinusoids::new(config.addition_time_embed_dim, &device)?,
            add_embedding: TimestepEmbedding::new(
                config.projection_class_embeddings_input_dim,
                time_dim,
                &mut weights.pp("add_embedding"),
            )?,
            down_blocks: (0..levels)
                .map(|level| DownBlock::new(&config, level, &mut weights.pp(&format!("down_blocks.{level}"))))
                .collect::<Result<_>>()?,
            mid_block: MidBlock::new(&config, &mut weights.pp("mid_block"))?,
            up_blocks: (0..levels)
                .map(|index| UpBlock::new(&config, index, &mut weights.pp(&format!("up_blocks.{index}"))))
                .collect::<Result<_>>()?,
            conv_norm_out: weights.group_norm("conv_norm_out", first_width, config.norm_num_groups, config.norm_eps)?,
            conv_out: conv3x3("conv_out", first_width, config.out_channels, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &UNetConfig {
        &self.config
    }

    /// The prediction (noise or velocity, as the model was trained) for noisy latents `sample (B, C, H, W)` at
    /// `timestep` of shape (B), (1) or (), from 0 (clean) to 999 (noise). The result is (B, `out_channels`, H, W) in
    /// the dtype of the weights.
    ///
    /// # Errors
    /// [`Error::Shape`] if the inputs do not fit the configuration or one another, `sample` has no pixel, or the text
    /// has no token; [`Error::DType`] if `sample` is not floating-point; [`Error::Argument`] if a timestep in host
    /// memory is not finite.
    pub fn forward(&self, sample: &Tensor, timestep: &Tensor, conditions: UNetConditions<'_>) -> Result<Tensor> {
        let batch = self.check(sample, timestep, conditions)?;
        let dtype = self.dtype();
        let time = self.time(timestep, conditions, batch)?;
        let text = conditions.encoder_hidden_states.to_dtype(dtype)?;
        let conditions = Conditions { time, text: &text };

        // The layers take channels last. Down blocks push their results to `skips`, and up blocks pop them.
        let mut x = self.conv_in.forward(&sample.to_dtype(dtype)?.permute(&[0, 2, 3, 1])?)?;
        let mut skips = vec![x.clone()];
        for block in &self.down_blocks {
            x = block.forward(x, &conditions, &mut skips)?;
        }
        x = self.mid_block.forward(&x, &conditions)?;
        for block in &self.up_blocks {
            x = block.forward(x, &conditions, &mut skips)?;
        }
        let x = self.conv_out.forward(&self.conv_norm_out.forward_silu(&x)?)?;
        x.permute(&[0, 3, 1, 2])?.contiguous()
    }

    /// SiLU(embedding of the time + embedding of the pooled text and `time_ids`), (B, `time_embed_dim`). Every residual
    /// block reads this result.
    fn time(&self, timestep: &Tensor, conditions: UNetConditions<'_>, batch: usize) -> Result<Tensor> {
        let timestep = timestep.reshape(timestep.elem_count())?;
        let time = self.time_embedding.forward(&self.time_sinusoids.forward(&timestep)?)?;
        let ids = conditions.time_ids.reshape(batch * TIME_IDS)?;
        let sinusoids =
            self.size_sinusoids.forward(&ids)?.reshape((batch, TIME_IDS * self.config.addition_time_embed_dim))?;
        // As in diffusers, pooled text and sinusoids are joined in f32. `add_embedding` converts both to the dtype of
        // the weights.
        let added = Tensor::cat(&[&conditions.text_embeds.to_dtype(DType::F32)?, &sinusoids], 1)?;
        time.add(&self.add_embedding.forward(&added)?)?.silu()
    }

    /// Check the inputs; returns the batch size.
    fn check(&self, sample: &Tensor, timestep: &Tensor, conditions: UNetConditions<'_>) -> Result<usize> {
        let misfit = |name: &str, found: &Tensor, expected: String| {
            Err(Error::shape(OP, format!("{name} has shape {:?}, expected {expected}", found.dims())))
        };
        let channels = self.config.in_channels;
        let batch = match *sample.dims() {
            [batch, c, height, width] if c == channels && height > 0 && width > 0 => batch,
            _ => return misfit("sample", sample, format!("(B, {channels}, H, W), H and W at least 1")),
        };
        if !is_float(sample.dtype()) {
            let found = sample.dtype().as_str();
            return Err(Error::dtype(OP, format!("sample is {found}, expected floating-point latents")));
        }
        if !(timestep.dims().is_empty() || matches!(*timestep.dims(), [n] if n == 1 || n == batch)) {
            return misfit("timestep", timestep, format!("({batch},), (1,) or ()"));
        }
        let UNetConditions { encoder_hidden_states, text_embeds, time_ids } = conditions;
        // `validate` has checked that all levels have the same value.
        let text_dim = self.config.cross_attention_dim[0];
        if !matches!(*encoder_hidden_states.dims(), [b, tokens, w] if b == batch && w == text_dim && tokens > 0) {
            let expected = format!("({batch}, L, {text_dim}) with at least one token");
            return misfit("encoder_hidden_states", encoder_hidden_states, expected);
        }
        let vectors = [("text_embeds", text_embeds, self.config.pooled_dim()), ("time_ids", time_ids, TIME_IDS)];
        for (name, tensor, width) in vectors {
            if tensor.dims() != [batch, width] {
                return misfit(name, tensor, format!("({batch}, {width})"));
            }
        }
        check_finite(timestep)?;
        Ok(batch)
    }
}

/// Rejects non-finite timesteps. Timesteps on CUDA devices are not checked, because reading them would synchronize.
fn check_finite(timestep: &Tensor) -> Result<()> {
    if !timestep.device().is_cpu() {
        return Ok(());
    }
    let times = timestep.detach().to_dtype(DType::F32)?.contiguous()?.to_vec::<f32>()?;
    times.iter().find(|time| !time.is_finite()).map_or(Ok(()), |time| {
        Err(Error::argument(OP, format!("the timestep is {time}, expected a number from 0 (clean) to 999 (noise)")))
    })
}

impl Module for SDXLUNet {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv_in", &self.conv_in)?;
        visitor.module("time_embedding", &self.time_embedding)?;
        visitor.module("add_embedding", &self.add_embedding)?;
        for (i, block) in self.down_blocks.iter().enumerate() {
            visitor.module(&format!("down_blocks.{i}"), block)?;
        }
        visitor.module("mid_block", &self.mid_block)?;
        for (i, block) in self.up_blocks.iter().enumerate() {
            visitor.module(&format!("up_blocks.{i}"), block)?;
        }
        visitor.module("conv_norm_out", &self.conv_norm_out)?;
        visitor.conv("conv_out", &self.conv_out)
    }
}

impl Architecture for SDXLUNet {
    type Config = UNetConfig;

    const KIND: &'static ModelKind = &super::KIND;

    const QUANTIZABLE: Quantizable = Quantizable {
        blocks: &["down_blocks.", "mid_block.", "up_blocks."],
        unquantized: &["time_emb_proj"],
        // With W8A8, only the feed-forward layers are quantized: the others are too small to gain from 8-bit products.
        multiplied: &["ff.net."],
        ..Quantizable::NOTHING
    };

    fn build(config: UNetConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<UNetConfig>) -> Result<UNetConfig> {
        keys::deduce(files, original.prefix, known)
    }

    fn parameter_layout(
        config: &UNetConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original, config)
    }
}

impl Model for SDXLUNet {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.conv_out.weight.dtype()
    }

    fn saved(&self, size: SampleSize, saved: &mut Saved) {
        // The number of pixels of a level's feature map.
        let area = |level: usize| size.height.div_ceil(1 << level) * size.width.div_ceil(1 << level);
        let widths = &self.config.block_out_channels;
        let (first_width, last_level) = (widths[0], widths.len() - 1);
        // `outside` counts layers outside of checkpoints. `conv` takes the numbers of input values and output pixels.
        saved.outside(|saved| {
            saved.conv(&self.conv_in, (area(0) * self.config.in_channels, area(0)));
            self.time_embedding.saved(saved);
            self.add_embedding.saved(saved);
        });
        // A down block takes the areas of its own level and of the next one, to which it downsamples. The last block
        // does not read the second area.
        for (level, block) in self.down_blocks.iter().enumerate() {
            block.saved((area(level), area(level + 1)), size.tokens, saved);
        }
        self.mid_block.saved(area(last_level), size.tokens, saved);
        // An up block takes the areas of its own level and of the level above, to which it upsamples. The block of
        // level 0 does not read the second area. `channels` is the number of channels of the block's input; `saved`
        // returns that of its result, which is the input of the next block.
        let mut channels = widths[last_level];
        for (level, block) in (0..=last_level).rev().zip(&self.up_blocks) {
            channels = block.saved((area(level), area(level.saturating_sub(1))), size.tokens, channels, saved);
        }
        saved.outside(|saved| {
            // The last norm keeps its input.
            saved.keep(area(0) * first_width);
            saved.conv(&self.conv_out, (area(0) * first_width, area(0)));
        });
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }

    fn original_names(&self) -> OriginalNames {
        let config = self.config.clone();
        Arc::new(move |layer| Key::plain(keys::original_name(&format!("{layer}.weight"), &config)?).of_layer())
    }
}
