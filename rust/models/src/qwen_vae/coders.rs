//! The encoder and the decoder of Qwen-Image's autoencoder.

use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_nn::{Blocks, Conv2d, Module, Visitor, Weights};

use super::QwenVaeConfig;
use super::blocks::{MidBlock, Norm, ResidualBlock};
use crate::layers::{Downsample, Upsample, conv3x3};

/// The name of the convolution in a downsampling or upsampling layer.
const RESAMPLE: &str = "resample.1";

/// A residual block or a downsampling layer of the encoder. Parameter names number both kinds together
/// (`down_blocks.0`, `down_blocks.1`, ...).
enum Down {
    Block(Box<ResidualBlock>),
    Halve(Downsample),
}

impl Down {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Block(block) => block.forward(x),
            Self::Halve(layer) => layer.forward(x),
        }
    }
}

impl Module for Down {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        match self {
            Self::Block(block) => block.visit(visitor),
            Self::Halve(layer) => layer.visit(visitor),
        }
    }
}

/// The last layers of the encoder or the decoder: a norm, SiLU and a 3×3 convolution.
struct Head {
    norm_out: Norm,
    conv_out: Conv2d<Tensor>,
}

impl Head {
    fn new(channels: usize, out_channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            norm_out: Norm::new("norm_out.gamma", channels, weights)?,
            conv_out: conv3x3("conv_out", channels, out_channels, weights)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.conv_out.forward(&self.norm_out.forward_silu(x)?)
    }

    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.norm_out.visit(visitor)?;
        visitor.conv("conv_out", &self.conv_out)
    }
}

/// Converts images (B, H, W, 3) to features (B, h, w, 2 · `z_dim`), from which `quant_conv` computes the means and the
/// logarithms of the variances of the latents. Each level but the last halves height and width.
pub(super) struct Encoder {
    conv_in: Conv2d<Tensor>,
    down_blocks: Blocks<Down>,
    mid_block: MidBlock,
    head: Head,
}

impl Encoder {
    pub fn new(config: &QwenVaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let widths = config.widths();
        let (levels, last_width) = (widths.len(), widths[widths.len() - 1]);
        let (mut layers, mut channels) = (Vec::new(), config.base_dim);
        for (level, &width) in widths.iter().enumerate() {
            for _ in 0..config.num_res_blocks {
                let weights = &mut weights.pp(&format!("down_blocks.{}", layers.len()));
                layers.push(Down::Block(Box::new(ResidualBlock::new(channels, width, weights)?)));
                channels = width;
            }
            if level + 1 < levels {
                let weights = &mut weights.pp(&format!("down_blocks.{}", layers.len()));
                // Zeros are added only at the lower and right edges.
                let asymmetric = true;
                layers.push(Down::Halve(Downsample::named(RESAMPLE, width, asymmetric, weights)?));
            }
        }
        Ok(Self {
            conv_in: conv3x3("conv_in", 3, config.base_dim, weights)?,
            down_blocks: layers.into_iter().collect(),
            mid_block: MidBlock::new(last_width, &mut weights.pp("mid_block"))?,
            head: Head::new(last_width, 2 * config.z_dim, weights)?,
        })
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.conv_in.weight.dtype()
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.down_blocks.run(
            &self.conv_in.forward(x)?,
            /* conditions: */ &[],
            |layer, x, _| layer.forward(x),
        )?;
        self.head.forward(&self.mid_block.forward(&x)?)
    }
}

impl Module for Encoder {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv_in", &self.conv_in)?;
        visitor.blocks("down_blocks", &self.down_blocks)?;
        visitor.module("mid_block", &self.mid_block)?;
        self.head.visit(visitor)
    }
}

/// One level of the decoder: residual blocks, then, except in the last level, an upsampling layer, which doubles height
/// and width and halves the number of channels.
struct Up {
    resnets: Blocks<ResidualBlock>,
    upsampler: Option<Upsample>,
}

impl Up {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.resnets.run(x, /* conditions: */ &[], |block, x, _| block.forward(x))?;
        self.upsampler.as_ref().map_or(Ok(x.clone()), |layer| layer.forward(&x, /* size: */ None))
    }
}

impl Module for Up {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.blocks("resnets", &self.resnets)?;
        self.upsampler.iter().try_for_each(|layer| visitor.module("upsamplers.0", layer))
    }
}

/// Converts latents (B, h, w, `z_dim`), after `post_quant_conv`, to images (B, H, W, 3).
pub(super) struct Decoder {
    conv_in: Conv2d<Tensor>,
    mid_block: MidBlock,
    up_blocks: Vec<Up>,
    head: Head,
}

impl Decoder {
    pub fn new(config: &QwenVaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let widths: Vec<usize> = config.widths().into_iter().rev().collect();
        let (levels, last_width) = (widths.len(), widths[widths.len() - 1]);
        let level = |i: usize, weights: &mut Weights<'_>| {
            let width = widths[i];
            // The upsampling layer of the previous level has halved the number of channels.
            let input_width = if i == 0 { width } else { widths[i - 1] / 2 };
            let block = |j| {
                let channels = if j == 0 { input_width } else { width };
                ResidualBlock::new(channels, width, &mut weights.pp(&format!("resnets.{j}")))
            };
            // One block more than in a level of the encoder.
            let resnets = (0..=config.num_res_blocks).map(block).collect::<Result<_>>()?;
            let upsampler = (i + 1 < levels)
                .then(|| Upsample::named(RESAMPLE, width, width / 2, &mut weights.pp("upsamplers.0")))
                .transpose()?;
            Ok(Up { resnets, upsampler })
        };
        Ok(Self {
            conv_in: conv3x3("conv_in", config.z_dim, widths[0], weights)?,
            mid_block: MidBlock::new(widths[0], &mut weights.pp("mid_block"))?,
            up_blocks: (0..levels)
                .map(|i| level(i, &mut weights.pp(&format!("up_blocks.{i}"))))
                .collect::<Result<_>>()?,
            head: Head::new(last_width, 3, weights)?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.mid_block.forward(&self.conv_in.forward(x)?)?;
        for level in &self.up_blocks {
            x = level.forward(&x)?;
        }
        self.head.forward(&x)
    }
}

impl Module for Decoder {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv("conv_in", &self.conv_in)?;
        visitor.module("mid_block", &self.mid_block)?;
        for (i, level) in self.up_blocks.iter().enumerate() {
            visitor.module(&format!("up_blocks.{i}"), level)?;
        }
        self.head.visit(visitor)
    }
}
