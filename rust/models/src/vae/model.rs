//! The autoencoder, which converts images to the distribution of their latents, and latents to images.

use serde_json::{Map, Value};
use trainable_candle_core::{DType, Result, Tensor};
use trainable_candle_io::WeightFiles;
use trainable_candle_nn::{Conv2d, Init, Module, Visitor, Weights};

use super::coders::{Decoder, Encoder};
use super::coding::Coding;
use super::{VaeConfig, keys};
use crate::layers::conv1x1;
use crate::pretrained::{Architecture, CheckpointNaming, Configuration, Layout};
use crate::registry::{Model, ModelKind};

/// The autoencoder of latent diffusion, with the results and the parameter names of diffusers' `AutoencoderKL`.
pub struct AutoencoderKL {
    config: VaeConfig,
    encoder: Encoder,
    decoder: Decoder,
    quant_conv: Option<Conv2d<Tensor>>,
    post_quant_conv: Option<Conv2d<Tensor>>,
    /// Mean and variance of FLUX.2's latents per channel, after patches of 2 × 2 latents were stacked along the
    /// channels: (4 · latent channels) each. Callers normalise latents with them; `encode` and `decode` do not. None
    /// for other autoencoders.
    statistics: Option<[Tensor; 2]>,
}

/// The parameter names of the latents' mean and variance.
const STATISTICS: [&str; 2] = ["bn.running_mean", "bn.running_var"];

impl AutoencoderKL {
    /// The `_class_name` in `config.json`, except for FLUX.2's autoencoder.
    pub const CLASS_NAME: &'static str = "AutoencoderKL";
    /// The `_class_name` of FLUX.2's autoencoder, which stores statistics of its latents.
    pub const NORMED_CLASS_NAME: &'static str = "AutoencoderKLFlux2";

    /// A model with the parameters of `weights`.
    ///
    /// # Errors
    /// [`trainable_candle_core::Error::Config`] if the configuration is wrong or the weights belong to another model.
    pub fn new(config: VaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        config.validate()?;
        let latent_channels = config.latent_channels;
        let [mean, variance] = STATISTICS;
        let mut statistic = |name: &str, initial: f64| weights.get(name, 4 * latent_channels, Init::Constant(initial));
        let is_normed = config.latent_norm_eps.is_some();
        let statistics = if is_normed { Some([statistic(mean, 0.0)?, statistic(variance, 1.0)?]) } else { None };
        Ok(Self {
            encoder: Encoder::new(&config, &mut weights.pp("encoder"))?,
            decoder: Decoder::new(&config, &mut weights.pp("decoder"))?,
            // Its input and output have the mean and the logarithm of the variance of each latent channel.
            quant_conv: config
                .use_quant_conv
                .then(|| conv1x1("quant_conv", 2 * latent_channels, 2 * latent_channels, weights))
                .transpose()?,
            post_quant_conv: config
                .use_post_quant_conv
                .then(|| conv1x1("post_quant_conv", latent_channels, latent_channels, weights))
                .transpose()?,
            statistics,
            config,
        })
    }

    /// The configuration.
    pub const fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// The distribution of the latents of `image (B, image channels, H, W)`, values -1 to 1: mean and logarithm of the
    /// variance, (B, latent channels, H / downscale, W / downscale) each, sizes rounded down. `tile_size` is rounded
    /// down to whole latents. An image with more pixels along a side is encoded in tiles of that size, which overlap by
    /// a quarter of their side. Near the seams of tiles the result differs a little from the result without tiles.
    ///
    /// # Errors
    /// As [`Coding::encode`].
    pub fn encode(&self, image: &Tensor, tile_size: Option<usize>) -> Result<(Tensor, Tensor)> {
        let channels = [self.config.in_channels, self.config.latent_channels];
        self.coding().encode(image, channels, tile_size, |x| {
            let moments = self.encoder.forward(x)?;
            self.quant_conv.as_ref().map_or(Ok(moments.clone()), |conv| conv.forward(&moments))
        })
    }

    /// The image of `latent (B, latent channels, h, w)`: (B, image channels, h · downscale, w · downscale), values
    /// about -1 to 1. The caller has undone the scale and shift of the latents. `tile_size` is rounded down to whole
    /// latents. An image with more pixels along a side is decoded in tiles of that size, which overlap by a quarter of
    /// their side and are blended at their seams. The memory of the decoder's activations then does not grow with the
    /// image.
    ///
    /// # Errors
    /// As [`Coding::decode`].
    pub fn decode(&self, latent: &Tensor, tile_size: Option<usize>) -> Result<Tensor> {
        self.coding().decode(latent, self.config.latent_channels, tile_size, |z| {
            let z = self.post_quant_conv.as_ref().map_or(Ok(z.clone()), |conv| conv.forward(z))?;
            self.decoder.forward(&z)
        })
    }

    /// The properties of this autoencoder that checks, conversions and tiles depend on.
    fn coding(&self) -> Coding {
        Coding { op: Self::CLASS_NAME, downscale: self.config.downscale(), dtype: self.dtype() }
    }
}

impl Module for AutoencoderKL {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) -> Result<()> {
        visitor.module("encoder", &self.encoder)?;
        visitor.module("decoder", &self.decoder)?;
        for (name, conv) in [("quant_conv", &self.quant_conv), ("post_quant_conv", &self.post_quant_conv)] {
            if let Some(conv) = conv {
                visitor.conv(name, conv)?;
            }
        }
        let statistics = STATISTICS.iter().zip(self.statistics.iter().flatten());
        statistics.into_iter().try_for_each(|(name, statistic)| visitor.tensor(name, statistic))
    }
}

impl Architecture for AutoencoderKL {
    type Config = VaeConfig;

    const KIND: &'static ModelKind = &super::KIND;

    fn build(config: VaeConfig, weights: &mut Weights<'_>) -> Result<Self> {
        Self::new(config, weights)
    }

    fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<VaeConfig>) -> Result<VaeConfig> {
        keys::deduce(files, original.prefix, known)
    }

    fn parameter_layout(
        config: &VaeConfig,
        original: Option<CheckpointNaming>,
        files: Option<&WeightFiles>,
    ) -> Box<dyn Layout> {
        keys::layout(original, config, files)
    }

    /// Whether the model needs f32: as the configuration says. The activations of some autoencoders, such as SDXL's,
    /// exceed the range of f16, and bf16 loses visible detail.
    fn force_upcast(config: &VaeConfig) -> bool {
        config.force_upcast
    }
}

impl Model for AutoencoderKL {
    fn kind(&self) -> &'static ModelKind {
        Self::KIND
    }

    fn class_name(&self) -> &'static str {
        self.config.class_name()
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
