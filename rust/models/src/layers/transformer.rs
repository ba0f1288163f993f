//! Transformer blocks inside a convolutional network (diffusers' `Transformer2DModel` and `BasicTransformerBlock`).
//! Their parameters have diffusers' names.

use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Blocks, Conv2d, GroupNorm, Init, Layer, LayerNorm, Linear, Module, Visitor, Weights};

use super::attention::{Attention, AttentionSizes};
use super::resnet::conv1x1;
use crate::saved::Saved;

/// Added to the variance in the norm before the blocks. In diffusers it is a constant too, not a field of the
/// configuration.
const NORM_EPS: f64 = 1e-6;
/// Added to the variance in the norms of the blocks.
const LAYER_NORM_EPS: f64 = 1e-5;
/// Width of the feed-forward network's hidden layer, as a multiple of the tokens' width.
const FEED_FORWARD_RATIO: usize = 4;

/// The sizes of a [`SpatialTransformer`].
#[derive(Clone, Copy, Debug)]
pub struct TransformerSizes {
    /// Number of channels of the image, and width of the image tokens.
    pub dim: usize,
    /// Number of heads of each attention.
    pub heads: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Width of the context's tokens.
    pub context_dim: usize,
    /// Number of groups of the group norm before the blocks.
    pub groups: usize,
    /// Whether the projections are linear layers instead of 1×1 convolutions.
    pub linear_projection: bool,
}

/// Attention of the image tokens to one another, attention to the context (text), then a gated feed-forward network.
/// Each of the three reads a layer norm of the residual stream, and its result is added to the residual stream.
struct Block {
    norm1: LayerNorm,
    attn1: Attention,
    norm2: LayerNorm,
    attn2: Attention,
    norm3: LayerNorm,
    ff_in: Linear<Tensor>,
    ff_out: Linear<Tensor>,
}

impl Block {
    fn new(sizes: &TransformerSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let &TransformerSizes { dim, heads, context_dim, .. } = sizes;
        let to_image = AttentionSizes { heads, dim, context_dim: None, qkv_bias: false };
        let to_context = AttentionSizes { context_dim: Some(context_dim), ..to_image };
        Ok(Self {
            norm1: weights.layer_norm("norm1", dim, LAYER_NORM_EPS)?,
            attn1: Attention::new(to_image, Init::Kaiming, &mut weights.pp("attn1"))?,
            norm2: weights.layer_norm("norm2", dim, LAYER_NORM_EPS)?,
            attn2: Attention::new(to_context, Init::Kaiming, &mut weights.pp("attn2"))?,
            norm3: weights.layer_norm("norm3", dim, LAYER_NORM_EPS)?,
            // Twice the hidden width: the features and their gates.
            ff_in: weights.linear("ff.net.0.proj", dim, 2 * FEED_FORWARD_RATIO * dim, /* bias */ true)?,
            ff_out: weights.linear("ff.net.2", FEED_FORWARD_RATIO * dim, dim, /* bias */ true)?,
        })
    }

    /// Returns the block's result for the image tokens `x (B, S, dim)` and `context (B, L, context_dim)`, in the shape
    /// of `x`.
    fn forward(&self, x: &Tensor, context: &Tensor) -> Result<Tensor> {
        let mixed = self.attn1.forward(&self.norm1.forward(x)?, None)?;
        // x + mixed, and the norm of this sum.
        let (x, normed) = self.norm2.add_forward(&mixed, x)?;
        let mixed = self.attn2.forward(&normed, Some(context))?;
        // x + mixed, plus the feed-forward network of the norm of this sum.
        self.ff_in.geglu_feed_forward(&self.norm3, &mixed, &x, &self.ff_out)
    }
}

impl Block {
    /// Adds to `saved` what the tape keeps for `area` image tokens and `context` tokens of the context.
    fn saved(&self, area: usize, context: usize, saved: &mut Saved) {
        let &[width, hidden] = self.ff_out.weight.dims() else { return };
        let values = area * width;
        // Each of the three norms keeps its input.
        saved.keep(values);
        self.attn1.saved(area, None, saved);
        saved.keep(values);
        self.attn2.saved(area, Some(context), saved);
        saved.keep(values);
        // A linear layer gets the number of its input values and the number of its tokens. The inputs of both layers, a
        // norm and an activation, are cheap to recompute.
        saved.cheap_linear(&self.ff_in, (values, area));
        // The gated activation keeps both halves of its input.
        saved.keep(2 * area * hidden);
        saved.cheap_linear(&self.ff_out, (area * hidden, area));
    }
}

impl Module for Block {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("norm1", &self.norm1)?;
        visitor.module("attn1", &self.attn1)?;
        visitor.module("norm2", &self.norm2)?;
        visitor.module("attn2", &self.attn2)?;
        visitor.module("norm3", &self.norm3)?;
        visitor.linear("ff.net.0.proj", &self.ff_in)?;
        visitor.linear("ff.net.2", &self.ff_out)
    }
}

/// A projection of each pixel's channels: a linear layer or a 1×1 convolution.
enum Projection {
    Linear(Linear<Tensor>),
    Conv(Conv2d<Tensor>),
}

impl Projection {
    fn new(name: &str, sizes: &TransformerSizes, weights: &mut Weights<'_>) -> Result<Self> {
        if sizes.linear_projection {
            Ok(Self::Linear(weights.linear(name, sizes.dim, sizes.dim, /* bias */ true)?))
        } else {
            Ok(Self::Conv(conv1x1(name, sizes.dim, sizes.dim, weights)?))
        }
    }

    /// Returns the projection of an image (B, H, W, dim), plus `residual`.
    fn forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        match self {
            Self::Linear(linear) => linear.forward_add(x, residual),
            Self::Conv(conv) => conv.forward_add(x, residual),
        }
    }

    /// Returns the projection of an image (B, H, W, dim).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Linear(linear) => linear.forward(x),
            Self::Conv(conv) => conv.forward(x),
        }
    }

    const fn layer(&self) -> Layer<'_> {
        match self {
            Self::Linear(linear) => Layer::Linear(linear),
            Self::Conv(conv) => Layer::Conv(conv),
        }
    }

    fn visit<'a>(&'a self, name: &str, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        match self {
            Self::Linear(linear) => visitor.linear(name, linear),
            Self::Conv(conv) => visitor.conv(name, conv),
        }
    }
}

/// Transformer blocks whose tokens are the pixels of an image (Rombach et al. 2022, arXiv:2112.10752). The image is
/// normalised and projected before the blocks. The blocks' result is projected and added to the image.
pub struct SpatialTransformer {
    norm: GroupNorm,
    proj_in: Projection,
    blocks: Blocks<Block>,
    proj_out: Projection,
}

impl SpatialTransformer {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: TransformerSizes, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self {
            norm: weights.group_norm("norm", sizes.dim, sizes.groups, NORM_EPS)?,
            proj_in: Projection::new("proj_in", &sizes, weights)?,
            blocks: (0..sizes.depth)
                .map(|i| Block::new(&sizes, &mut weights.pp(&format!("transformer_blocks.{i}"))))
                .collect::<Result<Blocks<_>>>()?
                // The convolutions around the blocks keep more for the backward pass than several blocks do together.
                // When the backward pass reaches these blocks, it has freed some of that memory, enough to recompute
                // several blocks at a time (a stretch). So full checkpointing keeps one input for each stretch instead
                // of one for each block.
                .nested(),
            proj_out: Projection::new("proj_out", &sizes, weights)?,
        })
    }

    /// Returns the result for the image `x (B, H, W, dim)` and `context (B, L, context_dim)`, in the shape of `x`.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if an input does not fit.
    pub fn forward(&self, x: &Tensor, context: &Tensor) -> Result<Tensor> {
        let &[batch, height, width, channels] = x.dims() else {
            return Err(Error::shape(
                "SpatialTransformer",
                format!("the input has shape {:?}, expected (B, H, W, C)", x.dims()),
            ));
        };
        let projected = self.proj_in.forward(&self.norm.forward(x)?)?;
        let tokens = projected.reshape((batch, height * width, channels))?;
        let tokens = self.blocks.run(&tokens, &[context], |block, x, conditions| block.forward(x, &conditions[0]))?;
        self.proj_out.forward_add(&tokens.reshape((batch, height, width, channels))?, x)
    }
}

impl SpatialTransformer {
    /// Adds to `saved` what the tape keeps for an image of `area` pixels and a context of `context` tokens.
    pub fn saved(&self, area: usize, context: usize, saved: &mut Saved) {
        let values = area * self.proj_in.layer().base().rows();
        // The layers before and after the blocks are outside of checkpoints.
        saved.outside(|saved| {
            // The norm keeps its input. Its result, which `proj_in` reads, is cheap to recompute.
            saved.keep(values);
            let cheap = true;
            saved.layers(&[self.proj_in.layer()], (values, area), cheap);
        });
        // Full checkpointing recomputes the blocks of a stretch together.
        let stretch = self.blocks.stretch();
        for i in 0..self.blocks.len() {
            // Counts block `i` under the policy of that block.
            saved.one(&self.blocks, i, |block, saved| {
                let joins_previous = i % stretch > 0;
                saved.block(values, joins_previous, |saved| block.saved(area, context, saved));
            });
        }
        let cheap = false;
        saved.outside(|saved| saved.layers(&[self.proj_out.layer()], (values, area), cheap));
    }
}

impl Module for SpatialTransformer {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("norm", &self.norm)?;
        self.proj_in.visit("proj_in", visitor)?;
        visitor.blocks("transformer_blocks", &self.blocks)?;
        self.proj_out.visit("proj_out", visitor)
    }
}
