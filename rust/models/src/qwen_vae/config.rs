//! The configuration of Qwen-Image's autoencoder: its sizes, and the means and standard deviations of its latents.

use serde_json::{Map, Value, json};
use trainable_candle_core::Result;

use super::AutoencoderKLQwenImage;
use crate::fields::Fields;
use crate::pretrained::Configuration;

/// `config.json` of an autoencoder as diffusers writes it (`AutoencoderKLQwenImage`). The default values are
/// those of the published model.
#[derive(Clone, Debug, PartialEq)]
pub struct QwenVaeConfig {
    /// Number of channels after the encoder's first convolution.
    pub base_dim: usize,
    /// Number of channels of the latents.
    pub z_dim: usize,
    /// The number of channels of each level of the encoder, divided by `base_dim`. Each level but the last halves
    /// height and width. The decoder has the levels in reverse order.
    pub dim_mult: Vec<usize>,
    /// Number of residual blocks of each level of the encoder. A level of the decoder has one block more.
    pub num_res_blocks: usize,
    /// The mean of each channel of the latents. The input of a diffusion model is (latent − mean) / std.
    pub latents_mean: Vec<f64>,
    /// The standard deviation (std) of each channel of the latents.
    pub latents_std: Vec<f64>,
    /// For each level of the encoder but the last, whether the level halves the number of frames of a video. This
    /// library only copies the field from one `config.json` to another, because it encodes and decodes single images.
    temporal: Value,
}

impl Default for QwenVaeConfig {
    fn default() -> Self {
        Self {
            base_dim: 96,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            latents_mean: vec![
                -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
                -0.1922, -0.9497, 0.2503, -0.2921,
            ],
            latents_std: vec![
                2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
                1.1253, 2.8251, 1.9160,
            ],
            temporal: json!([false, true, true]),
        }
    }
}

/// The name of the field `temporal` in `config.json`, as diffusers misspells it.
const TEMPORAL: &str = "temperal_downsample";

impl Configuration for QwenVaeConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(AutoencoderKLQwenImage::CLASS_NAME, map);
        // Only these values of the two fields are supported.
        fields.only(&[("attn_scales", json!([])), ("input_channels", json!(3))])?;
        // The forward pass has no dropout. The value of TEMPORAL is not checked, but copied from `map` below.
        fields.ignore(&["dropout", TEMPORAL]);
        let standard = Self::default();
        let dim_mult = if map.contains_key("dim_mult") { fields.list("dim_mult")? } else { standard.dim_mult };
        let z_dim = fields.size("z_dim", Some(standard.z_dim))?;
        let mut numbers = |name, default| {
            if map.contains_key(name) { fields.numbers(name, z_dim) } else { Ok(default) }
        };
        let latents_mean = numbers("latents_mean", standard.latents_mean)?;
        let latents_std = numbers("latents_std", standard.latents_std)?;
        let config = Self {
            base_dim: fields.size("base_dim", Some(standard.base_dim))?,
            num_res_blocks: fields.size("num_res_blocks", Some(standard.num_res_blocks))?,
            temporal: map.get(TEMPORAL).cloned().unwrap_or(standard.temporal),
            z_dim,
            dim_mult,
            latents_mean,
            latents_std,
        };
        config.validate(&fields)?;
        fields.finish()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": AutoencoderKLQwenImage::CLASS_NAME,
            "attn_scales": [],
            "base_dim": self.base_dim,
            "dim_mult": self.dim_mult,
            "dropout": 0.0,
            "latents_mean": self.latents_mean,
            "latents_std": self.latents_std,
            "num_res_blocks": self.num_res_blocks,
            TEMPORAL: self.temporal,
            "z_dim": self.z_dim,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl QwenVaeConfig {
    /// Check the fields that depend on one another. `fields` names the wrong field in the error.
    fn validate(&self, fields: &Fields<'_>) -> Result<()> {
        // A missing list gets the default values, which may be too many or too few for this `z_dim`.
        for (name, numbers) in [("latents_mean", &self.latents_mean), ("latents_std", &self.latents_std)] {
            if numbers.len() != self.z_dim {
                return Err(fields.wrong(name, &format!("a list of {} numbers, as many as z_dim says", self.z_dim)));
            }
        }
        if self.latents_std.iter().any(|&std| std <= 0.0) {
            return Err(fields.wrong("latents_std", "numbers above 0"));
        }
        let is_odd = |width: &usize| !width.is_multiple_of(2);
        if self.widths().iter().skip(1).any(is_odd) {
            let expected = "an even number (or even numbers after the first number of dim_mult), because the decoder \
                            halves the number of channels after every level but the last";
            return Err(fields.wrong("base_dim", expected));
        }
        Ok(())
    }

    /// Number of channels of each level of the encoder.
    pub(super) fn widths(&self) -> Vec<usize> {
        self.dim_mult.iter().map(|factor| factor * self.base_dim).collect()
    }

    /// Pixels per latent along one side of an image.
    pub fn downscale(&self) -> usize {
        1 << (self.dim_mult.len() - 1)
    }
}
