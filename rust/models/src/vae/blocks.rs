//! The middle of the encoder and the decoder.

use std::sync::Arc;

use trainable_candle_core::checkpoint::{Policy, checkpoint_with};
use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{GroupNorm, Init, Module, Visitor, Weights};

use super::VaeConfig;
use crate::layers::{Attention, AttentionSizes, ResnetBlock, ResnetSizes};

/// Added to the variance in the norms; fixed in diffusers.
pub(super) const EPS: f64 = 1e-6;

/// A residual block that is not told the time.
pub(super) fn resnet(
    config: &VaeConfig,
    channels: usize,
    out_channels: usize,
    weights: &mut Weights<'_>,
) -> Result<Arc<ResnetBlock>> {
    let sizes = ResnetSizes { channels, out_channels, time_dim: None, groups: config.norm_num_groups, eps: EPS };
    Ok(Arc::new(ResnetBlock::new(sizes, weights)?))
}

/// A residual block that keeps what `policy` says.
pub(super) fn run(block: &Arc<ResnetBlock>, x: &Tensor, policy: Policy) -> Result<Tensor> {
    let block = block.clone();
    let forward = move |xs: &[Tensor]| Ok(vec![block.forward(&xs[0], None)?]);
    Ok(checkpoint_with(policy, forward, &[x])?.remove(0))
}

/// Attention of one head over the pixels, added to the image.
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
                format!("an image has shape {:?}, expected (B, H, W, C)", x.dims()),
            ));
        };
        let pixels = self.group_norm.forward(x)?.reshape((batch, height * width, channels))?;
        x.add(&self.attention.forward(&pixels, None)?.reshape(x.dims())?)
    }
}

impl Module for PixelAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("group_norm", &self.group_norm)?;
        self.attention.visit(visitor)
    }
}

/// `mid_block`.
pub(super) struct MidBlock {
    resnets: [Arc<ResnetBlock>; 2],
    attention: Option<PixelAttention>,
}

impl MidBlock {
    pub(super) fn new(config: &VaeConfig, channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            resnets: [
                resnet(config, channels, channels, &mut weights.pp("resnets.0"))?,
                resnet(config, channels, channels, &mut weights.pp("resnets.1"))?,
            ],
            attention: config
                .mid_block_add_attention
                .then(|| PixelAttention::new(config, channels, &mut weights.pp("attentions.0")))
                .transpose()?,
        })
    }

    /// `x (B, H, W, C)` → the same shape.
    pub(super) fn forward(&self, x: &Tensor, policy: Policy) -> Result<Tensor> {
        let mut x = run(&self.resnets[0], x, policy)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(&x)?;
        }
        run(&self.resnets[1], &x, policy)
    }
}

impl Module for MidBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        if let Some(attention) = &self.attention {
            visitor.module("attentions.0", attention)?;
        }
        for (i, block) in self.resnets.iter().enumerate() {
            visitor.module(&format!("resnets.{i}"), block.as_ref())?;
        }
        Ok(())
    }
}
