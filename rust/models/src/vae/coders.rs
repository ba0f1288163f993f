//! The encoder and the decoder of the autoencoder of SDXL, Flux and other models (`AutoencoderKL` in diffusers).

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::{Blocks, Conv2d, GroupNorm, Module, Visitor, Weights};

use super::VaeConfig;
use super::blocks::{EPS, MidBlock, resnet};
use crate::layers::{Downsample, ResnetBlock, Upsample, conv3x3};

/// The residual blocks of a level, then the level's downsampling or upsampling `S`, if it has one.
struct Level<S> {
    resnets: Blocks<ResnetBlock>,
    resize: Option<S>,
}

impl<S> Level<S> {
    /// Makes `count` residual blocks and adds `resize`. The first block reads `channels` channels, the others read
    /// `out_channels`; all return `out_channels`.
    fn new(
        config: &VaeConfig,
        count: usize,
        channels: usize,
        out_channels: usize,
        resize: Option<S>,
        weights: &mut Weights<'_>,
    ) -> Result<Self> {
        let block = |i| {
            let channels = if i == 0 { channels } else { out_channels };
            resnet(config, channels, out_channels, &mut weights.pp(&format!("resnets.{i}")))
        };
        Ok(Self { resnets: (0..count).map(block).collect::<Result<_>>()?, resize })
    }

    /// The level's result for the feature map `x (B, H, W, C)`; `run_resize` runs the downsampling or upsampling.
    fn forward(&self, x: Tensor, run_resize: impl FnOnce(&S, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x =
            self.resnets.run(&x, /* conditions: */ &[], |block, x, _| block.forward(x, /* embedding: */ None))?;
        match &self.resize {
            Some(layer) => run_resize(layer, &x),
            None => Ok(x),
        }
    }

    /// Visits the layers; `resize_name` is the name of the downsampling or upsampling.
    fn visit_layers<'a>(&'a self, resize_name: &str, visitor: &mut Visitor<'a, '_>) -> Result<()>
    where
        S: Module,
    {
        visitor.blocks("resnets", &self.resnets)?;
        match &self.resize {
            Some(layer) => visitor.module(resize_name, layer),
            None => Ok(()),
        }
    }
}

impl Module for Level<Downsample> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.visit_layers("downsamplers.0", visitor)
    }
}

impl Module for Level<Upsample> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.visit_layers("upsamplers.0", visitor)
    }
}

/// Converts images (B, H, W, `in_channels`) to moments (B, h, w, 2 · `latent_channels`), before `quant_conv` if there
/// is one. Moments are the means, then the logarithms of the variances of the latents.
pub(super) struct Encoder {
    conv_in: Conv2d<Tensor>,
    down_blocks: Vec<Level<Downsample>>,
    mid_block: MidBlock,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d<Tensor>,
}

impl Encoder {
    pub(super) fn new(config: &VaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let widths = &config.block_out_channels;
        let (levels, last_width) = (widths.len(), widths[widths.len() - 1]);
        let level = |i: usize, weights: &mut Weights<'_>| {
            // Zeros are added only at the lower and right edges.
            let asymmetric = true;
            let downsample = (i + 1 < levels)
                .then(|| Downsample::new(widths[i], asymmetric, &mut weights.pp("downsamplers.0")))
                .transpose()?;
            // The first level reads the result of `conv_in`, which has as many channels as this level.
            let input_width = widths[i.saturating_sub(1)];
            Level::new(config, config.layers_per_block, input_width, widths[i], downsample, weights)
        };
        Ok(Self {
            conv_in: conv3x3("conv_in", config.in_channels, widths[0], weights)?,
            down_blocks: (0..levels)
                .map(|i| level(i, &mut weights.pp(&format!("down_blocks.{i}"))))
                .collect::<Result<_>>()?,
            mid_block: MidBlock::new(config, last_width, &mut weights.pp("mid_block"))?,
            conv_norm_out: weights.group_norm("conv_norm_out", last_width, config.norm_num_groups, EPS)?,
            conv_out: conv3x3("conv_out", last_width, 2 * config.latent_channels, weights)?,
        })
    }

    /// The dtype of the weights.
    pub(super) fn dtype(&self) -> DType {
        self.conv_in.weight.dtype()
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.conv_in.forward(x)?;
        for level in &self.down_blocks {
            x = level.forward(x, Downsample::forward)?;
        }
        let x = self.mid_block.forward(&x)?;
        self.conv_out.forward(&self.conv_norm_out.forward_silu(&x)?)
    }
}

impl Module for Encoder {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv_in", &self.conv_in)?;
        for (i, level) in self.down_blocks.iter().enumerate() {
            visitor.module(&format!("down_blocks.{i}"), level)?;
        }
        visitor.module("mid_block", &self.mid_block)?;
        visitor.module("conv_norm_out", &self.conv_norm_out)?;
        visitor.conv("conv_out", &self.conv_out)
    }
}

/// Converts latents (B, h, w, `latent_channels`), after `post_quant_conv` if there is one, to images
/// (B, H, W, `out_channels`).
pub(super) struct Decoder {
    conv_in: Conv2d<Tensor>,
    mid_block: MidBlock,
    up_blocks: Vec<Level<Upsample>>,
    conv_norm_out: GroupNorm,
    conv_out: Conv2d<Tensor>,
}

impl Decoder {
    pub(super) fn new(config: &VaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let widths: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (levels, last_width) = (widths.len(), widths[widths.len() - 1]);
        let level = |i: usize, weights: &mut Weights<'_>| {
            let upsample =
                (i + 1 < levels).then(|| Upsample::new(widths[i], &mut weights.pp("upsamplers.0"))).transpose()?;
            let input_width = widths[i.saturating_sub(1)];
            // One block more than in a level of the encoder.
            Level::new(config, config.layers_per_block + 1, input_width, widths[i], upsample, weights)
        };
        Ok(Self {
            conv_in: conv3x3("conv_in", config.latent_channels, widths[0], weights)?,
            mid_block: MidBlock::new(config, widths[0], &mut weights.pp("mid_block"))?,
            up_blocks: (0..levels)
                .map(|i| level(i, &mut weights.pp(&format!("up_blocks.{i}"))))
                .collect::<Result<_>>()?,
            conv_norm_out: weights.group_norm("conv_norm_out", last_width, config.norm_num_groups, EPS)?,
            conv_out: conv3x3("conv_out", last_width, config.out_channels, weights)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.mid_block.forward(&self.conv_in.forward(x)?)?;
        for level in &self.up_blocks {
            x = level.forward(x, |layer, x| layer.forward(x, /* size: */ None))?;
        }
        self.conv_out.forward(&self.conv_norm_out.forward_silu(&x)?)
    }
}

impl Module for Decoder {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv_in", &self.conv_in)?;
        visitor.module("mid_block", &self.mid_block)?;
        for (i, level) in self.up_blocks.iter().enumerate() {
            visitor.module(&format!("up_blocks.{i}"), level)?;
        }
        visitor.module("conv_norm_out", &self.conv_norm_out)?;
        visitor.conv("conv_out", &self.conv_out)
    }
}
