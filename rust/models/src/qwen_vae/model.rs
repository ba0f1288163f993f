//! Qwen-Image's autoencoder, which converts images to the distribution of their latents, and latents to images.

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::{Conv2d, Module, Visitor, Weights};

use super::coders::{Decoder, Encoder};
use super::{QwenVaeConfig, keys};
use crate::layers::conv1x1;
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};
use crate::vae::Coding;

/// Qwen-Image's autoencoder, for single images. It has the parameter names of diffusers' `AutoencoderKLQwenImage`, and
/// the results that diffusers' class has for one frame. Layers that change the number of frames are not loaded.
pub struct AutoencoderKLQwenImage {
    config: QwenVaeConfig,
    encoder: Encoder,
    decoder: Decoder,
    quant_conv: Conv2d<Tensor>,
    post_quant_conv: Conv2d<Tensor>,
}

impl AutoencoderKLQwenImage {
    /// The `_class_name` in the model's `config.json`.
    pub const CLASS_NAME: &'static str = "AutoencoderKLQwenImage";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the weights belong to another model.
    pub fn new(config: QwenVaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        let z_dim = config.z_dim;
        Ok(Self {
            encoder: Encoder::new(&config, &mut weights.pp("encoder"))?,
            decoder: Decoder::new(&config, &mut weights.pp("decoder"))?,
            // The encoder returns `z_dim` means and as many logarithms of variances.
            quant_conv: conv1x1("quant_conv", 2 * z_dim, 2 * z_dim, weights)?,
            post_quant_conv: conv1x1("post_quant_conv", z_dim, z_dim, weights)?,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &QwenVaeConfig {
        &self.config
    }

    /// The distribution of the latents of `image (B, 3, H, W)` (values -1 to 1), without normalisation: mean and
    /// logarithm of the variance, (B, `z_dim`, H / downscale, W / downscale) each, sizes rounded down. With
    /// `tile_size`, an image with more than `tile_size` pixels along a side is encoded in tiles of that size, which
    /// overlap by a quarter of their side. Near the seams of tiles the result differs a little from the result without
    /// tiles.
    ///
    /// # Errors
    /// As [`Coding::encode`].
    pub fn encode(&self, image: &Tensor, tile_size: Option<usize>) -> Result<(Tensor, Tensor)> {
        let encode = |x: &Tensor| self.quant_conv.forward(&self.encoder.forward(x)?);
        let (image_channels, latent_channels) = (3, self.config.z_dim);
        self.coding().encode(image, [image_channels, latent_channels], tile_size, encode)
    }

    /// The image of `latent (B, z_dim, h, w)`: (B, 3, h · downscale, w · downscale), values -1 to 1. The caller has
    /// undone the normalisation of the latents. With `tile_size`, an image with more than `tile_size` pixels along a
    /// side is decoded in tiles of that size, which overlap by a quarter of their side and are blended at their seams.
    /// The memory of the decoder's activations then does not grow with the image.
    ///
    /// # Errors
    /// As [`Coding::decode`].
    pub fn decode(&self, latent: &Tensor, tile_size: Option<usize>) -> Result<Tensor> {
        let decode = |z: &Tensor| self.decoder.forward(&self.post_quant_conv.forward(z)?);
        self.coding().decode(latent, self.config.z_dim, tile_size, decode)?.clamp(Some(-1.0), Some(1.0))
    }

    /// The steps around the encoder and the decoder, with the properties of this autoencoder.
    fn coding(&self) -> Coding {
        Coding { op: Self::CLASS_NAME, downscale: self.config.downscale(), dtype: self.dtype() }
    }
}

impl Module for AutoencoderKLQwenImage {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("encoder", &self.encoder)?;
        visitor.module("decoder", &self.decoder)?;
        visitor.conv("quant_conv", &self.quant_conv)?;
        visitor.conv("post_quant_conv", &self.post_quant_conv)
    }
}

impl Architecture for AutoencoderKLQwenImage {
    type Config = QwenVaeConfig;

    const KIND: &'static ModelKind = &super::KIND;

    fn build(config: QwenVaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<QwenVaeConfig>) -> Result<QwenVaeConfig> {
        keys::deduce(files, original.prefix, known)
    }

    fn parameter_layout(
        config: &QwenVaeConfig,
        original: Option<CheckpointNaming>,
        _files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original, config)
    }
}

impl Model for AutoencoderKLQwenImage {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn configuration(&self) -> Map<String, Value> {
        self.config.to_json()
    }

    fn dtype(&self) -> DType {
        self.encoder.dtype()
    }

    fn layout(&self, original: Option<CheckpointNaming>, files: Option<&WeightFiles>) -> Box<dyn Layout> {
        Self::parameter_layout(&self.config, original, files)
    }
}
