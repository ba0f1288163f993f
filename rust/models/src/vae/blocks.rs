//! The middle block of an autoencoder's encoder and decoder (diffusers' `AutoencoderKL`), and its residual blocks.

use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Blocks, GroupNorm, Init, Module, Visitor, Weights};

use super::VaeConfig;
use crate::layers::{Attention, AttentionSizes, ResnetBlock, ResnetSizes};

/// Added to the variance in the norms. In diffusers it is a constant too, not a field of the configuration.
pub(super) const EPS: f64 = 1e-6;

/// Makes a residual block without a timestep.
pub(super) fn resnet(
    config: &VaeConfig,
    channels: usize,
    out_channels: usize,
    weights: &mut Weights<'_>,
) -> Result<ResnetBlock> {
    let sizes = ResnetSizes { channels, out_channels, time_dim: None, groups: config.norm_num_groups, eps: EPS };
    ResnetBlock::new(sizes, weights)
}

/// Runs residual block `index` of `blocks` on the feature map `x (B, H, W, C)`.
fn run(blocks: &Blocks<ResnetBlock>, index: usize, x: &Tensor) -> Result<Tensor> {
    blocks.run_one(index, &[x], |block, inputs| {
        let time_embedding = None;
        block.forward(&inputs[0], time_embedding)
    })
}

/// Self-attention with one head over the pixels of a feature map. Its result is added to the feature map.
struct PixelAttention {
    group_norm: GroupNorm,
    attention: Attention,
}

impl PixelAttention {
    fn new(config: &VaeConfig, dim: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let sizes = AttentionSizes { heads: 1, dim, context_dim: None, qkv_bias: true };
        Ok(Self {
            group_norm: weights.group_norm("group_norm", dim, config.norm_num_groups, EPS)?,
            attention: Attention::new(sizes, Init::Kaiming, weights)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let &[batch, height, width, channels] = x.dims() else {
            return Err(Error::shape(
                "AutoencoderKL",
                format!("the feature map has shape {:?}, expected (B, H, W, C)", x.dims()),
            ));
        };
        let pixels = self.group_norm.forward(x)?.reshape((batch, height * width, channels))?;
        let context = None; // self-attention
        x.add(&self.attention.forward(&pixels, context)?.reshape(x.dims())?)
    }
}

impl Module for PixelAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("group_norm", &self.group_norm)?;
        // In diffusers the attention's layers (`to_q` and others) are beside `group_norm`, not in a module of theirs.
        self.attention.visit(visitor)
    }
}

/// The block at the lowest resolution of the encoder or decoder (`mid_block`): two residual blocks, with attention
/// between them if the configuration says so.
pub(super) struct MidBlock {
    resnets: Blocks<ResnetBlock>,
    attention: Option<PixelAttention>,
}

impl MidBlock {
    pub(super) fn new(config: &VaeConfig, channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            resnets: (0..2)
                .map(|i| resnet(config, channels, channels, &mut weights.pp(&format!("resnets.{i}"))))
                .collect::<Result<_>>()?,
            attention: config
                .mid_block_add_attention
                .then(|| PixelAttention::new(config, channels, &mut weights.pp("attentions.0")))
                .transpose()?,
        })
    }

    /// The block's result for the feature map `x (B, H, W, C)`, in the same shape.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = run(&self.resnets, 0, x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(&x)?;
        }
        run(&self.resnets, 1, &x)
    }
}

impl Module for MidBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        if let Some(attention) = &self.attention {
            visitor.module("attentions.0", attention)?;
        }
        visitor.blocks("resnets", &self.resnets)
    }
}
