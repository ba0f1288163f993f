//! The levels of the UNet: residual blocks and transformers, then downsampling or upsampling.

use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Blocks, Module, Visitor, Weights};

use super::UNetConfig;
use crate::layers::{Downsample, ResnetBlock, ResnetSizes, SpatialTransformer, TransformerSizes, Upsample};
use crate::saved::Saved;

/// The conditions that every block reads, for B images.
pub(super) struct Conditions<'a> {
    /// SiLU of the time's embedding, (B, `time_embed_dim`).
    pub time: Tensor,
    /// The features of L text tokens, (B, L, `cross_attention_dim`).
    pub text: &'a Tensor,
}

/// The sizes of a residual block.
fn resnet_sizes(config: &UNetConfig, channels: usize, out_channels: usize) -> ResnetSizes {
    let (groups, eps) = (config.norm_num_groups, config.norm_eps);
    ResnetSizes { channels, out_channels, time_dim: Some(config.time_embed_dim()), groups, eps }
}

/// Makes a transformer, which follows a residual block of `level`.
fn transformer(config: &UNetConfig, level: usize, weights: &mut Weights<'_>) -> Result<SpatialTransformer> {
    let sizes = TransformerSizes {
        dim: config.block_out_channels[level],
        heads: config.num_attention_heads[level],
        depth: config.transformer_layers_per_block[level],
        context_dim: config.cross_attention_dim[level],
        groups: config.norm_num_groups,
        linear_projection: config.use_linear_projection,
    };
    SpatialTransformer::new(sizes, weights)
}

/// Runs residual block `index` on the feature maps `parts`, joined along the channels.
fn run(blocks: &Blocks<ResnetBlock>, index: usize, parts: &[&Tensor], conditions: &Conditions<'_>) -> Result<Tensor> {
    let inputs: Vec<&Tensor> = std::iter::once(&conditions.time).chain(parts.iter().copied()).collect();
    // The tape keeps the parts anyway, as results of other blocks. The function joins them inside the block's
    // checkpoint, if the block has one, so that the tape does not also keep the joined copy.
    blocks.run_one(index, &inputs, |block, inputs| {
        let x = match &inputs[1..] {
            [x] => x.clone(),
            parts => Tensor::cat(&parts.iter().collect::<Vec<_>>(), 3)?,
        };
        block.forward(&x, Some(&inputs[0]))
    })
}

/// A level of the first half of the UNet (`down_blocks.N`): residual blocks, each followed by a transformer if
/// the level has attention, then, except in the last level, downsampling.
pub(super) struct DownBlock {
    resnets: Blocks<ResnetBlock>,
    attentions: Vec<SpatialTransformer>,
    downsample: Option<Downsample>,
}

impl DownBlock {
    pub(super) fn new(config: &UNetConfig, level: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let channels = config.block_out_channels[level];
        // The input has the channels of the previous level. At level 0 it is the result of `conv_in`, which has the
        // channels of level 0.
        let input_channels = config.block_out_channels[level.saturating_sub(1)];
        let (mut resnets, mut attentions) = (Vec::new(), Vec::new());
        for i in 0..config.layers_per_block {
            let sizes = resnet_sizes(config, if i == 0 { input_channels } else { channels }, channels);
            resnets.push(ResnetBlock::new(sizes, &mut weights.pp(&format!("resnets.{i}")))?);
            if config.down_attention[level] {
                attentions.push(transformer(config, level, &mut weights.pp(&format!("attentions.{i}")))?);
            }
        }
        // Zeros are added at all edges, not only at the lower and right ones.
        let asymmetric = false;
        let downsample = (level + 1 < config.block_out_channels.len())
            .then(|| Downsample::new(channels, asymmetric, &mut weights.pp("downsamplers.0")))
            .transpose()?;
        Ok(Self { resnets: resnets.into_iter().collect(), attentions, downsample })
    }

    /// Computes the next level's feature map from `x (B, H, W, C)`; the last level returns its own feature map. Appends
    /// to `skips` the result of each residual block (or of the transformer after it) and of the downsampling.
    pub(super) fn forward(
        &self,
        mut x: Tensor,
        conditions: &Conditions<'_>,
        skips: &mut Vec<Tensor>,
    ) -> Result<Tensor> {
        for i in 0..self.resnets.len() {
            x = run(&self.resnets, i, &[&x], conditions)?;
            if let Some(attention) = self.attentions.get(i) {
                x = attention.forward(&x, conditions.text)?;
            }
            skips.push(x.clone());
        }
        if let Some(downsample) = &self.downsample {
            x = downsample.forward(&x)?;
            skips.push(x.clone());
        }
        Ok(x)
    }
}

impl DownBlock {
    /// Adds to `saved` what the tape keeps if the level's feature map has `area` pixels, the next level's feature map
    /// has `smaller` pixels, and the text has `tokens` tokens.
    pub(super) fn saved(&self, (area, smaller): (usize, usize), tokens: usize, saved: &mut Saved) {
        for i in 0..self.resnets.len() {
            // None: all input channels are the block's own, because none come from a skip.
            let own_channels = None;
            saved.one(&self.resnets, i, |block, saved| block.saved(area, own_channels, saved));
            if let Some(attention) = self.attentions.get(i) {
                attention.saved(area, tokens, saved);
            }
        }
        if let Some(downsample) = &self.downsample {
            downsample.saved(area, smaller, saved);
        }
    }
}

impl Module for DownBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visit_layers(&self.resnets, &self.attentions, visitor)?;
        match &self.downsample {
            Some(downsample) => visitor.module("downsamplers.0", downsample),
            None => Ok(()),
        }
    }
}

/// The block between the down blocks and the up blocks (`mid_block`): residual block, transformer, residual block.
pub(super) struct MidBlock {
    resnets: Blocks<ResnetBlock>,
    /// One transformer.
    attentions: Vec<SpatialTransformer>,
}

impl MidBlock {
    pub(super) fn new(config: &UNetConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let level = config.block_out_channels.len() - 1;
        let channels = config.block_out_channels[level];
        let resnet = |i: usize, weights: &mut Weights<'_>| {
            let sizes = resnet_sizes(config, channels, channels);
            ResnetBlock::new(sizes, &mut weights.pp(&format!("resnets.{i}")))
        };
        Ok(Self {
            resnets: (0..2).map(|i| resnet(i, weights)).collect::<Result<_>>()?,
            attentions: vec![transformer(config, level, &mut weights.pp("attentions.0"))?],
        })
    }

    /// The block's result for the feature map `x (B, H, W, C)`, in the same shape.
    pub(super) fn forward(&self, x: &Tensor, conditions: &Conditions<'_>) -> Result<Tensor> {
        let x = run(&self.resnets, 0, &[x], conditions)?;
        let x = self.attentions[0].forward(&x, conditions.text)?;
        run(&self.resnets, 1, &[&x], conditions)
    }
}

impl MidBlock {
    /// Adds to `saved` what the tape keeps for a feature map of `area` pixels and a text of `tokens` tokens.
    pub(super) fn saved(&self, area: usize, tokens: usize, saved: &mut Saved) {
        for i in 0..self.resnets.len() {
            // None: all input channels are the block's own, because none come from a skip.
            let own_channels = None;
            saved.one(&self.resnets, i, |block, saved| block.saved(area, own_channels, saved));
            if let Some(attention) = self.attentions.get(i) {
                attention.saved(area, tokens, saved);
            }
        }
    }
}

impl Module for MidBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visit_layers(&self.resnets, &self.attentions, visitor)
    }
}

/// A level of the second half of the UNet (`up_blocks.N`): residual blocks, each followed by a transformer if the up
/// block has attention, then upsampling. Only the up block of level 0, which runs last, has no upsampling.
pub(super) struct UpBlock {
    resnets: Blocks<ResnetBlock>,
    attentions: Vec<SpatialTransformer>,
    upsample: Option<Upsample>,
}

impl UpBlock {
    /// Makes the up block `index`. Up block 0 belongs to the last level, which has the smallest feature map.
    pub(super) fn new(config: &UNetConfig, index: usize, weights: &mut Weights<'_>) -> Result<Self> {
        let level = config.block_out_channels.len() - 1 - index;
        // The input of up block 0 comes from the middle block, which has the last level's channels.
        let width = |level: usize| config.block_out_channels[level.min(config.block_out_channels.len() - 1)];
        let channels = width(level);
        let (mut resnets, mut attentions) = (Vec::new(), Vec::new());
        for i in 0..=config.layers_per_block {
            let x_channels = if i == 0 { width(level + 1) } else { channels };
            // The skip of the last residual block is the input of the level's down block. It has the channels of the
            // previous level. At level 0 it is the result of `conv_in`, which has the channels of level 0.
            let skip_channels = if i == config.layers_per_block { width(level.saturating_sub(1)) } else { channels };
            let sizes = resnet_sizes(config, x_channels + skip_channels, channels);
            resnets.push(ResnetBlock::new(sizes, &mut weights.pp(&format!("resnets.{i}")))?);
            if config.up_attention[index] {
                attentions.push(transformer(config, level, &mut weights.pp(&format!("attentions.{i}")))?);
            }
        }
        let upsample = (level > 0).then(|| Upsample::new(channels, &mut weights.pp("upsamplers.0"))).transpose()?;
        Ok(Self { resnets: resnets.into_iter().collect(), attentions, upsample })
    }

    /// Computes the previous level's feature map from `x (B, H, W, C)`; level 0 returns its own feature map. Each
    /// residual block takes the last of `skips`. The previous level's feature map has the height and width of the last
    /// skip that remains.
    pub(super) fn forward(
        &self,
        mut x: Tensor,
        conditions: &Conditions<'_>,
        skips: &mut Vec<Tensor>,
    ) -> Result<Tensor> {
        for i in 0..self.resnets.len() {
            let skip = skips
                .pop()
                .ok_or_else(|| Error::shape("SDXLUNet", "the up blocks read more skips than the down blocks make"))?;
            x = run(&self.resnets, i, &[&x, &skip], conditions)?;
            if let Some(attention) = self.attentions.get(i) {
                x = attention.forward(&x, conditions.text)?;
            }
        }
        let Some(upsample) = &self.upsample else { return Ok(x) };
        // The upsampling doubles height and width. Where the down block halved an odd size and rounded up, the size of
        // the result must be one less than the double.
        let size = skips.last().map(|skip| [skip.dims()[1], skip.dims()[2]]);
        upsample.forward(&x, size)
    }
}

impl UpBlock {
    /// Adds to `saved` what the tape keeps if the level's feature map has `area` pixels, the previous level's feature
    /// map has `larger` pixels, the text has `tokens` tokens, and the up block's input `x` has `channels` channels.
    /// Returns the number of channels of the result. The skips are not counted here, because the down blocks count
    /// them.
    pub(super) fn saved(
        &self,
        (area, larger): (usize, usize),
        tokens: usize,
        mut channels: usize,
        saved: &mut Saved,
    ) -> usize {
        for (i, block) in self.resnets.iter().enumerate() {
            // `channels` counts those of x, without those of the skip.
            saved.one(&self.resnets, i, |block, saved| block.saved(area, Some(channels), saved));
            channels = block.out_channels();
            if let Some(attention) = self.attentions.get(i) {
                attention.saved(area, tokens, saved);
            }
        }
        if let Some(upsample) = &self.upsample {
            upsample.saved(larger, saved);
        }
        channels
    }
}

impl Module for UpBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visit_layers(&self.resnets, &self.attentions, visitor)?;
        match &self.upsample {
            Some(upsample) => visitor.module("upsamplers.0", upsample),
            None => Ok(()),
        }
    }
}

/// Visits the layers that down, middle and up blocks have.
fn visit_layers<'a>(
    resnets: &'a Blocks<ResnetBlock>,
    attentions: &'a [SpatialTransformer],
    visitor: &mut Visitor<'a, '_>,
) -> Result<()> {
    for (i, attention) in attentions.iter().enumerate() {
        visitor.module(&format!("attentions.{i}"), attention)?;
    }
    visitor.blocks("resnets", resnets)
}
