//! The sizes of an autoencoder.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::AutoencoderKL;
use crate::fields::Fields;
use crate::pretrained::Configuration;

/// `config.json` of an autoencoder as diffusers writes it (`AutoencoderKL`). The default is SDXL's.
#[derive(Clone, Debug, PartialEq)]
pub struct VaeConfig {
    /// Channels of the images that the encoder reads.
    pub in_channels: usize,
    /// Channels of the images that the decoder returns.
    pub out_channels: usize,
    /// Channels of each level, from the level with the largest feature map to the level with the smallest. In the
    /// encoder, each level but the last halves height and width; the decoder doubles them in reverse order.
    pub block_out_channels: Vec<usize>,
    /// Residual blocks of each level of the encoder; those of the decoder have one more.
    pub layers_per_block: usize,
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Groups of the group norms.
    pub norm_num_groups: usize,
    /// Height and width of the images that the model was made for.
    pub sample_size: usize,
    /// The input of a diffusion model is (latent - shift_factor) · scaling_factor.
    pub scaling_factor: f64,
    /// The shift in the formula of `scaling_factor`. None if the file gives no shift; the shift is then 0.
    pub shift_factor: Option<f64>,
    /// Whether the model needs f32 instead of half precision.
    pub force_upcast: bool,
    /// Whether a 1×1 convolution follows the encoder.
    pub use_quant_conv: bool,
    /// Whether a 1×1 convolution precedes the decoder.
    pub use_post_quant_conv: bool,
    /// Whether the middle blocks have attention.
    pub mid_block_add_attention: bool,
    /// The epsilon that is added to the variances when FLUX.2's latents are normalised. Before that, 2 × 2 patches of
    /// the latents are stacked along the channels; the weights have a mean and a variance for each of the resulting
    /// channels. None for other autoencoders, which have a scaling factor and a shift instead.
    pub latent_norm_eps: Option<f64>,
}

impl Default for VaeConfig {
    fn default() -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            latent_channels: 4,
            norm_num_groups: 32,
            sample_size: 1024,
            scaling_factor: 0.13025,
            shift_factor: None,
            force_upcast: true,
            use_quant_conv: true,
            use_post_quant_conv: true,
            mid_block_add_attention: true,
            latent_norm_eps: None,
        }
    }
}

/// The only supported type of the encoder's levels.
const DOWN: &str = "DownEncoderBlock2D";
/// The only supported type of the decoder's levels.
const UP: &str = "UpDecoderBlock2D";

impl Configuration for VaeConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        // Whether this is FLUX.2's autoencoder, which stores statistics of its latents.
        let is_normed = map.contains_key(NORM_EPS)
            || map.get("_class_name").and_then(Value::as_str) == Some(AutoencoderKL::NORMED_CLASS_NAME);
        let mut fields = Fields::new(AutoencoderKL::CLASS_NAME, map);
        // Fields of which only one value is supported.
        fields.only(&[("patch_size", json!([2, 2])), ("decoder_block_out_channels", Value::Null)])?;
        fields.ignore(&["batch_norm_momentum"]);
        fields.only(&[("act_fn", json!("silu")), ("latents_mean", Value::Null), ("latents_std", Value::Null)])?;
        let block_out_channels = fields.list("block_out_channels")?;
        let levels = block_out_channels.len();
        // These two calls only check that each field lists the one supported name once for each level.
        fields.names("down_block_types", levels, &[(DOWN, ())])?;
        fields.names("up_block_types", levels, &[(UP, ())])?;
        // The defaults are those of diffusers' classes, which are not SDXL's.
        let config = Self {
            in_channels: fields.size("in_channels", Some(3))?,
            out_channels: fields.size("out_channels", Some(3))?,
            layers_per_block: fields.size("layers_per_block", Some(1))?,
            latent_channels: fields.size("latent_channels", Some(if is_normed { 32 } else { 4 }))?,
            latent_norm_eps: if is_normed { Some(fields.number(NORM_EPS, Some(DEFAULT_NORM_EPS))?) } else { None },
            norm_num_groups: fields.size("norm_num_groups", Some(32))?,
            // One number, or height and width. No computation depends on it, so the height suffices.
            sample_size: fields.sizes("sample_size", 2, Some(32))?[0],
            scaling_factor: fields.number("scaling_factor", Some(if is_normed { 1.0 } else { 0.18215 }))?,
            shift_factor: fields.optional_number("shift_factor")?,
            force_upcast: fields.flag("force_upcast", true)?,
            use_quant_conv: fields.flag("use_quant_conv", true)?,
            use_post_quant_conv: fields.flag("use_post_quant_conv", true)?,
            mid_block_add_attention: fields.flag("mid_block_add_attention", true)?,
            block_out_channels,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let levels = self.block_out_channels.len();
        let json = json!({
            "_class_name": self.class_name(),
            "act_fn": "silu",
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "block_out_channels": self.block_out_channels,
            "down_block_types": vec![DOWN; levels],
            "up_block_types": vec![UP; levels],
            "layers_per_block": self.layers_per_block,
            "latent_channels": self.latent_channels,
            "norm_num_groups": self.norm_num_groups,
            "sample_size": self.sample_size,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
            "force_upcast": self.force_upcast,
            "use_quant_conv": self.use_quant_conv,
            "use_post_quant_conv": self.use_post_quant_conv,
            "mid_block_add_attention": self.mid_block_add_attention,
        });
        let mut map = if let Value::Object(map) = json { map } else { Map::new() };
        if let Some(eps) = self.latent_norm_eps {
            // The class of FLUX.2's autoencoder has no such fields.
            map.retain(|name, _| !matches!(name.as_str(), "scaling_factor" | "shift_factor" | "force_upcast"));
            map.insert(NORM_EPS.to_owned(), json!(eps));
            map.insert("patch_size".to_owned(), json!([2, 2]));
        }
        map
    }
}

/// The name of the field for `latent_norm_eps`: diffusers keeps the means and variances of the latents in a batch norm.
const NORM_EPS: &str = "batch_norm_eps";
/// The value of `latent_norm_eps` for FLUX.2's autoencoder if no file gives it.
pub(super) const DEFAULT_NORM_EPS: f64 = 1e-4;

impl VaeConfig {
    /// Check that `norm_num_groups` divides all of `block_out_channels`.
    ///
    /// # Errors
    /// [`Error::Config`] if it does not.
    pub fn validate(&self) -> Result<()> {
        match self.block_out_channels.iter().find(|channels| !channels.is_multiple_of(self.norm_num_groups)) {
            None => Ok(()),
            Some(channels) => Err(Error::Config(format!(
                "{}: block_out_channels has {channels}, expected multiples of norm_num_groups, {}",
                AutoencoderKL::CLASS_NAME,
                self.norm_num_groups
            ))),
        }
    }

    /// The class of diffusers that has this configuration.
    pub const fn class_name(&self) -> &'static str {
        if self.latent_norm_eps.is_some() { AutoencoderKL::NORMED_CLASS_NAME } else { AutoencoderKL::CLASS_NAME }
    }

    /// Pixels per latent along one side of an image.
    pub fn downscale(&self) -> usize {
        1 << (self.block_out_channels.len() - 1)
    }
}
