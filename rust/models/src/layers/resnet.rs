//! The convolutional blocks that U-Nets and autoencoders share (He et al. 2016, arXiv:1603.05027). Their parameters
//! have diffusers' names. Feature maps are (batch, height, width, channels).

use trainable_candle_core::ops::conv::Conv2dOptions;
use trainable_candle_core::ops::upsample::upsample_nearest2d;
use trainable_candle_core::{Error, Result, Tensor};
use trainable_candle_nn::{Conv2d, GroupNorm, Linear, Module, Visitor, Weights};

use crate::saved::Saved;

/// A 3×3 convolution with a bias. Its result has the input's height and width.
pub(crate) fn conv3x3(
    name: &str,
    channels: usize,
    out_channels: usize,
    weights: &mut Weights<'_>,
) -> Result<Conv2d<Tensor>> {
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    weights.conv2d(name, channels, out_channels, [3, 3], options, /* bias: */ true)
}

/// A 1×1 convolution with a bias.
pub(crate) fn conv1x1(
    name: &str,
    channels: usize,
    out_channels: usize,
    weights: &mut Weights<'_>,
) -> Result<Conv2d<Tensor>> {
    weights.conv2d(name, channels, out_channels, [1, 1], Conv2dOptions::default(), /* bias: */ true)
}

/// The sizes of a [`ResnetBlock`].
#[derive(Clone, Copy, Debug)]
pub struct ResnetSizes {
    /// Number of channels of the input.
    pub channels: usize,
    /// Number of channels of the result.
    pub out_channels: usize,
    /// Width of the timestep's embedding. None if the block takes no embedding.
    pub time_dim: Option<usize>,
    /// Number of groups of the group norms.
    pub groups: usize,
    /// Added to the variance in the norms.
    pub eps: f64,
}

/// Applies norm, SiLU and 3×3 convolution twice, and adds the result to the input, or to a 1×1 convolution of the input
/// if the numbers of channels differ. A projection of the timestep's embedding, if the block takes one, is added after
/// the first 3×3 convolution.
pub struct ResnetBlock {
    norm1: GroupNorm,
    conv1: Conv2d<Tensor>,
    time_emb_proj: Option<Linear<Tensor>>,
    norm2: GroupNorm,
    conv2: Conv2d<Tensor>,
    conv_shortcut: Option<Conv2d<Tensor>>,
}

impl ResnetBlock {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(sizes: ResnetSizes, weights: &mut Weights<'_>) -> Result<Self> {
        let ResnetSizes { channels, out_channels, time_dim, groups, eps } = sizes;
        Ok(Self {
            norm1: weights.group_norm("norm1", channels, groups, eps)?,
            conv1: conv3x3("conv1", channels, out_channels, weights)?,
            time_emb_proj: time_dim
                .map(|dim| weights.linear("time_emb_proj", dim, out_channels, /* bias: */ true))
                .transpose()?,
            norm2: weights.group_norm("norm2", out_channels, groups, eps)?,
            conv2: conv3x3("conv2", out_channels, out_channels, weights)?,
            conv_shortcut: (channels != out_channels)
                .then(|| conv1x1("conv_shortcut", channels, out_channels, weights))
                .transpose()?,
        })
    }

    /// Returns the block's result `(B, H, W, out_channels)` for the feature map `x (B, H, W, channels)`. `embedding` is
    /// SiLU of the timestep's embedding, `(B, time_dim)`. A block that takes no embedding ignores it.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if an input does not fit, [`Error::Argument`] if the block needs an
    /// embedding and `embedding` is None.
    pub fn forward(&self, x: &Tensor, embedding: Option<&Tensor>) -> Result<Tensor> {
        let hidden = match &self.time_emb_proj {
            Some(project) => {
                let embedding =
                    embedding.ok_or_else(|| Error::argument("ResnetBlock", "the timestep's embedding is missing"))?;
                // (B, 1, 1, out_channels), which is added to every pixel.
                let projected = project.forward(embedding)?.unsqueeze(1)?.unsqueeze(1)?;
                self.conv1.forward_add(&self.norm1.forward_silu(x)?, &projected)?
            }
            None => self.conv1.forward(&self.norm1.forward_silu(x)?)?,
        };
        let normed = self.norm2.forward_silu(&hidden)?;
        // The autoencoder's feature maps are large, so memory is freed as soon as possible.
        drop(hidden);
        match &self.conv_shortcut {
            Some(shortcut) => self.conv2.forward_add(&normed, &shortcut.forward(x)?),
            None => self.conv2.forward_add(&normed, x),
        }
    }
}

impl ResnetBlock {
    /// The number of channels of the result.
    pub fn out_channels(&self) -> usize {
        self.conv1.weight.dims()[0]
    }

    /// Adds to `saved` what the tape keeps for a feature map of `area` pixels. `own_channels` is the number of input
    /// channels that only this block needs; None means all channels. The number is smaller in an up block of a U-Net:
    /// its input is concatenated with a result of a down block, which the tape keeps anyway.
    pub fn saved(&self, area: usize, own_channels: Option<usize>, saved: &mut Saved) {
        let &[out, _, _, channels] = self.conv1.weight.dims() else { return };
        // Layers are counted with (number of their input values, number of pixels of their result). `cheap_conv` is for
        // convolutions whose input comes from a norm, which selective checkpointing recomputes.
        let inputs = area * channels;
        let own_inputs = area * own_channels.unwrap_or(channels);
        // Full checkpointing does not recompute this block together with the previous one.
        let joins_previous = false;
        saved.block(own_inputs, joins_previous, |saved| {
            // The input of the first norm.
            saved.keep(inputs);
            saved.cheap_conv(&self.conv1, (inputs, area));
            if let Some(project) = &self.time_emb_proj {
                // Its input is one vector for the whole feature map, so the map counts as one pixel.
                saved.linear(project, (project.weight.dims()[1], 1));
            }
            // The input of the second norm.
            saved.keep(area * out);
            saved.cheap_conv(&self.conv2, (area * out, area));
            if let Some(shortcut) = &self.conv_shortcut {
                saved.conv(shortcut, (inputs, area));
            }
        });
    }
}

impl Module for ResnetBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("norm1", &self.norm1)?;
        visitor.conv("conv1", &self.conv1)?;
        if let Some(project) = &self.time_emb_proj {
            visitor.linear("time_emb_proj", project)?;
        }
        visitor.module("norm2", &self.norm2)?;
        visitor.conv("conv2", &self.conv2)?;
        match &self.conv_shortcut {
            Some(shortcut) => visitor.conv("conv_shortcut", shortcut),
            None => Ok(()),
        }
    }
}

/// The name that the convolution of a [`Downsample`] or [`Upsample`] has in most models.
const CONV: &str = "conv";

/// Halves height and width of a feature map with a strided convolution.
pub struct Downsample {
    conv: Conv2d<Tensor>,
    name: &'static str,
    /// Whether zeros are added only at the lower and right edges, as in autoencoders, instead of at each of the four
    /// edges.
    asymmetric: bool,
}

impl Downsample {
    /// Takes parameters below `weights`. If `asymmetric`, zeros are added only at the lower and right edges, otherwise
    /// at all four edges.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(channels: usize, asymmetric: bool, weights: &mut Weights<'_>) -> Result<Self> {
        Self::named(CONV, channels, asymmetric, weights)
    }

    /// As [`new`](Self::new), for a convolution with this name.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn named(name: &'static str, channels: usize, asymmetric: bool, weights: &mut Weights<'_>) -> Result<Self> {
        let padding = if asymmetric { [0, 0] } else { [1, 1] };
        let options = Conv2dOptions { stride: [2, 2], padding, ..Conv2dOptions::default() };
        let conv = weights.conv2d(name, channels, channels, [3, 3], options, /* bias: */ true)?;
        Ok(Self { conv, name, asymmetric })
    }

    /// Returns the smaller feature map: `x (B, H, W, C)` → `(B, ⌈H / 2⌉, ⌈W / 2⌉, C)`, or `(B, ⌊H / 2⌋, ⌊W / 2⌋, C)` if
    /// asymmetric.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if the input does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !self.asymmetric {
            return self.conv.forward(x);
        }
        let &[batch, height, width, channels] = x.dims() else {
            return Err(Error::shape(
                "Downsample",
                format!("the input has shape {:?}, expected (B, H, W, C)", x.dims()),
            ));
        };
        let zeros = |shape: [usize; 4]| Tensor::zeros(shape.as_slice(), x.dtype(), x.device());
        let x = Tensor::cat(&[x, &zeros([batch, 1, width, channels])?], 1)?;
        self.conv.forward(&Tensor::cat(&[&x, &zeros([batch, height + 1, 1, channels])?], 2)?)
    }
}

impl Downsample {
    /// Adds to `saved` what the tape keeps for an input of `area` pixels and a result of `smaller_area` pixels.
    pub fn saved(&self, area: usize, smaller_area: usize, saved: &mut Saved) {
        let &[_, _, _, channels] = self.conv.weight.dims() else { return };
        // `outside`: the convolution is in no checkpoint. The pair is (number of input values, pixels of the result).
        saved.outside(|saved| saved.conv(&self.conv, (area * channels, smaller_area)));
    }
}

impl Module for Downsample {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv(self.name, &self.conv)
    }
}

/// Enlarges a feature map by repeating pixels, then convolves it.
pub struct Upsample {
    conv: Conv2d<Tensor>,
    name: &'static str,
}

impl Upsample {
    /// Takes parameters below `weights`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn new(channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Self::named(CONV, channels, channels, weights)
    }

    /// As [`new`](Self::new), for a convolution with this name, whose result has `out_channels` channels.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn named(name: &'static str, channels: usize, out_channels: usize, weights: &mut Weights<'_>) -> Result<Self> {
        Ok(Self { conv: conv3x3(name, channels, out_channels, weights)?, name })
    }

    /// Returns the larger feature map: `x (B, H, W, C)` → `(B, size[0], size[1], out_channels)`. Without `size`, height
    /// and width double.
    ///
    /// # Errors
    /// [`Error::Shape`], `DType` or `Device` if the input does not fit.
    pub fn forward(&self, x: &Tensor, size: Option<[usize; 2]>) -> Result<Tensor> {
        let &[_, height, width, _] = x.dims() else {
            return Err(Error::shape("Upsample", format!("the input has shape {:?}, expected (B, H, W, C)", x.dims())));
        };
        self.conv.forward(&upsample_nearest2d(x, size.unwrap_or([2 * height, 2 * width]))?)
    }
}

impl Upsample {
    /// Adds to `saved` what the tape keeps for a feature map that is enlarged to `larger_area` pixels.
    pub fn saved(&self, larger_area: usize, saved: &mut Saved) {
        let &[_, _, _, channels] = self.conv.weight.dims() else { return };
        // `outside`: the convolution is in no checkpoint. The pair is (number of input values, pixels of the result).
        saved.outside(|saved| saved.conv(&self.conv, (larger_area * channels, larger_area)));
    }
}

impl Module for Upsample {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.conv(self.name, &self.conv)
    }
}
