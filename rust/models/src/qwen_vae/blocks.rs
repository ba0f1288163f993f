//! The blocks of the encoder and the decoder of Qwen-Image's autoencoder. Feature maps are (batch, height, width,
//! channels).

use trainable_candle_core::{Result, Tensor};
use trainable_candle_nn::{Blocks, Conv2d, Init, Linear, Module, Projected, RmsNorm, Visitor, Weights};

use crate::layers::{attend, conv1x1, conv3x3};

/// Added to the mean square of a pixel's channels in the norms. diffusers instead divides by the L2 norm of the
/// channels, or by 1e-12 if the L2 norm is smaller. The results differ only at pixels whose channels are all nearly 0.
const EPS: f64 = 1e-24;

/// An RMS norm over the channels of each pixel.
pub(super) struct Norm {
    norm: RmsNorm,
    /// The name of the norm's weight in files.
    name: &'static str,
}

impl Norm {
    pub fn new(name: &'static str, channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let weight = Some(weights.get(name, channels, Init::Constant(1.0))?);
        Ok(Self { norm: RmsNorm { weight, eps: EPS }, name })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward(x)
    }

    /// SiLU of [`forward`](Self::forward).
    pub fn forward_silu(&self, x: &Tensor) -> Result<Tensor> {
        self.forward(x)?.silu()
    }

    pub fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.norm.weight.iter().try_for_each(|weight| visitor.tensor(self.name, weight))
    }
}

/// Applies norm, SiLU and 3×3 convolution twice, and adds the result to the input, or to a 1×1 convolution of the input
/// if the numbers of channels differ.
pub(super) struct ResidualBlock {
    norm1: Norm,
    conv1: Conv2d<Tensor>,
    norm2: Norm,
    conv2: Conv2d<Tensor>,
    conv_shortcut: Option<Conv2d<Tensor>>,
}

impl ResidualBlock {
    pub fn new(channels: usize, out_channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let changes_channels = channels != out_channels;
        Ok(Self {
            norm1: Norm::new("norm1.gamma", channels, weights)?,
            conv1: conv3x3("conv1", channels, out_channels, weights)?,
            norm2: Norm::new("norm2.gamma", out_channels, weights)?,
            conv2: conv3x3("conv2", out_channels, out_channels, weights)?,
            conv_shortcut: changes_channels
                .then(|| conv1x1("conv_shortcut", channels, out_channels, weights))
                .transpose()?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.conv1.forward(&self.norm1.forward_silu(x)?)?;
        let hidden = self.conv2.forward(&self.norm2.forward_silu(&hidden)?)?;
        match &self.conv_shortcut {
            Some(shortcut) => shortcut.forward(x)?.add(&hidden),
            None => x.add(&hidden),
        }
    }
}

impl Module for ResidualBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.norm1.visit(visitor)?;
        visitor.conv("conv1", &self.conv1)?;
        self.norm2.visit(visitor)?;
        visitor.conv("conv2", &self.conv2)?;
        self.conv_shortcut.iter().try_for_each(|conv| visitor.conv("conv_shortcut", conv))
    }
}

/// Attention with one head, whose tokens are the pixels. Its projected result is added to the feature map.
struct PixelAttention {
    norm: Norm,
    to_qkv: Linear<Tensor>,
    proj: Linear<Tensor>,
}

impl PixelAttention {
    fn new(channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let has_bias = true;
        Ok(Self {
            norm: Norm::new("norm.gamma", channels, weights)?,
            to_qkv: weights.linear("to_qkv", channels, 3 * channels, has_bias)?,
            proj: weights.linear("proj", channels, channels, has_bias)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, area, channels) = (x.dims()[0], x.dims()[1] * x.dims()[2], x.dims()[3]);
        let pixels = self.norm.forward(x)?.reshape((batch, area, channels))?;
        let (heads, is_causal) = (1, false);
        let mixed = attend(&Projected::Joined(self.to_qkv.forward(&pixels)?), heads, is_causal)?;
        x.add(&self.proj.forward(&mixed)?.reshape(x.dims())?)
    }
}

impl Module for PixelAttention {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        self.norm.visit(visitor)?;
        visitor.linear("to_qkv", &self.to_qkv)?;
        visitor.linear("proj", &self.proj)
    }
}

/// The block at the lowest resolution of the encoder or decoder (`mid_block`): residual block, attention, residual
/// block.
pub(super) struct MidBlock {
    resnets: Blocks<ResidualBlock>,
    attention: PixelAttention,
}

impl MidBlock {
    pub fn new(channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let resnet = |i| ResidualBlock::new(channels, channels, &mut weights.pp(&format!("resnets.{i}")));
        Ok(Self {
            resnets: (0..2).map(resnet).collect::<Result<_>>()?,
            attention: PixelAttention::new(channels, &mut weights.pp("attentions.0"))?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let resnet = |i, x: &Tensor| self.resnets.run_one(i, &[x], |block, inputs| block.forward(&inputs[0]));
        resnet(1, &self.attention.forward(&resnet(0, x)?)?)
    }
}

impl Module for MidBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("attentions.0", &self.attention)?;
        visitor.blocks("resnets", &self.resnets)
    }
}
