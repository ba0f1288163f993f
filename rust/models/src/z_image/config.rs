//! The sizes of a Z-Image transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::ZImageTransformer;
use crate::fields::Fields;
use crate::layers::joint::BlockSizes;
use crate::pretrained::Configuration;

/// `config.json` of a transformer as diffusers writes it (`ZImageTransformer2DModel`). The default is the published
/// model's.
#[derive(Clone, Debug, PartialEq)]
pub struct ZImageConfig {
    /// Channels of the latents.
    pub in_channels: usize,
    /// Features of each token.
    pub dim: usize,
    /// Number of blocks over image and text.
    pub n_layers: usize,
    /// Number of blocks over the image alone, which is also the number of blocks over the text alone.
    pub n_refiner_layers: usize,
    /// Heads of each attention.
    pub n_heads: usize,
    /// Features of each text token before its projection to `dim`.
    pub cap_feat_dim: usize,
    /// Added to the mean square in the norms, except those of queries and keys.
    pub norm_eps: f64,
    /// The base of the rotary embedding's frequencies.
    pub rope_theta: f64,
    /// For each axis of a token's position: the number of features of a head that the rotary embedding rotates by the
    /// position along this axis.
    pub axes_dims: Vec<usize>,
    /// Number of positions along each of these axes.
    pub axes_lens: Vec<usize>,
}

impl Default for ZImageConfig {
    fn default() -> Self {
        Self {
            in_channels: 16,
            dim: 3840,
            n_layers: 30,
            n_refiner_layers: 2,
            n_heads: 30,
            cap_feat_dim: 2560,
            norm_eps: 1e-5,
            rope_theta: 256.0,
            axes_dims: vec![32, 48, 48],
            axes_lens: vec![1024, 512, 512],
        }
    }
}

/// Latents along one side of the square that becomes a token.
pub(super) const PATCH: usize = 2;
/// The epsilon added to the mean square in the norms of queries and keys. It does not depend on `norm_eps`.
const QK_EPS: f64 = 1e-5;

impl Configuration for ZImageConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(ZImageTransformer::CLASS_NAME, map);
        // Fields for which only one value is supported.
        fields.only(&[
            ("all_patch_size", json!([PATCH])),
            ("all_f_patch_size", json!([1])),
            ("qk_norm", json!(true)),
            ("t_scale", json!(1000.0)),
        ])?;
        let published = Self::default();
        let mut list = |name, default: &Vec<usize>| {
            if map.contains_key(name) { fields.list(name) } else { Ok(default.clone()) }
        };
        let axes_dims = list("axes_dims", &published.axes_dims)?;
        let axes_lens = list("axes_lens", &published.axes_lens)?;
        let n_heads = fields.size("n_heads", Some(published.n_heads))?;
        fields.only(&[("n_kv_heads", json!(n_heads))])?;
        let config = Self {
            in_channels: fields.size("in_channels", Some(published.in_channels))?,
            dim: fields.size("dim", Some(published.dim))?,
            n_layers: fields.size("n_layers", Some(published.n_layers))?,
            n_refiner_layers: fields.size("n_refiner_layers", Some(published.n_refiner_layers))?,
            cap_feat_dim: fields.size("cap_feat_dim", Some(published.cap_feat_dim))?,
            norm_eps: fields.number("norm_eps", Some(published.norm_eps))?,
            rope_theta: fields.number("rope_theta", Some(published.rope_theta))?,
            n_heads,
            axes_dims,
            axes_lens,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": ZImageTransformer::CLASS_NAME,
            "all_patch_size": [PATCH],
            "all_f_patch_size": [1],
            "in_channels": self.in_channels,
            "dim": self.dim,
            "n_layers": self.n_layers,
            "n_refiner_layers": self.n_refiner_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_heads,
            "norm_eps": self.norm_eps,
            "qk_norm": true,
            "cap_feat_dim": self.cap_feat_dim,
            "rope_theta": self.rope_theta,
            "t_scale": 1000.0,
            "axes_dims": self.axes_dims,
            "axes_lens": self.axes_lens,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl ZImageConfig {
    /// Check that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Config`] that names the first wrong field and what it must be.
    pub fn validate(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Config(format!("{}: {text}", ZImageTransformer::CLASS_NAME)));
        if self.dim == 0 || !self.dim.is_multiple_of(self.n_heads) {
            return wrong(format!("dim is {}, expected a positive multiple of n_heads, {}", self.dim, self.n_heads));
        }
        let (axes, width) = (&self.axes_dims, self.dim / self.n_heads);
        if axes.len() != 3 || axes.iter().sum::<usize>() != width || !axes.iter().all(|axis| axis.is_multiple_of(2)) {
            return wrong(format!(
                "axes_dims is {axes:?}, expected three even numbers whose sum is dim / n_heads, {width}"
            ));
        }
        if self.axes_lens.len() != 3 {
            return wrong(format!("axes_lens is {:?}, expected three numbers", self.axes_lens));
        }
        Ok(())
    }

    /// Number of features of the condition, which is computed from the time: `dim`, but at most 256, as in diffusers.
    pub fn condition_dim(&self) -> usize {
        self.dim.min(256)
    }

    /// Hidden features of the feed-forward layers: 8/3 · `dim`, rounded down.
    pub const fn middle(&self) -> usize {
        8 * self.dim / 3
    }

    /// The sizes of an attention.
    pub const fn attention(&self) -> BlockSizes {
        BlockSizes { heads: self.n_heads, head_dim: self.dim / self.n_heads, qk_norm: true, bias: false, eps: QK_EPS }
    }
}
