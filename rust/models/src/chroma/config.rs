//! The configuration of a Chroma transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::ChromaTransformer;
use super::approximator::ApproximatorSizes;
use crate::fields::Fields;
use crate::layers::joint::{BlockSizes, EPS, RopeAxes};
use crate::pretrained::Configuration;

/// `config.json` of Chroma's transformer as diffusers writes it (`ChromaTransformer2DModel`). The default is the
/// configuration of the published model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChromaConfig {
    /// Number of values of an input image token. A token is a square of 2 × 2 latent pixels, so this is 4 · the number
    /// of latent channels.
    pub in_channels: usize,
    /// Number of values of an image token of the prediction.
    pub out_channels: usize,
    /// Number of double-stream blocks.
    pub num_layers: usize,
    /// Number of single-stream blocks.
    pub num_single_layers: usize,
    /// Number of heads of each attention.
    pub num_attention_heads: usize,
    /// Number of features of each head. A token has `num_attention_heads · attention_head_dim` features.
    pub attention_head_dim: usize,
    /// Number of features of a token of the text encoder.
    pub joint_attention_dim: usize,
    /// For each position axis, the even number of features of a head that the axis rotates. The sum is
    /// `attention_head_dim`.
    pub axes_dims_rope: Vec<usize>,
    /// Number of input features from which the approximator computes a row of the modulation table; a multiple of 8,
    /// because an eighth are sines of the time and an eighth cosines. (The approximator is the network that computes
    /// the modulation of all blocks. Each row of its table is a shift, a scale or a gate.)
    pub approximator_num_channels: usize,
    /// Number of features of the approximator's hidden layers.
    pub approximator_hidden_dim: usize,
    /// Number of the approximator's residual layers.
    pub approximator_layers: usize,
}

impl Default for ChromaConfig {
    fn default() -> Self {
        Self {
            in_channels: 64,
            out_channels: 64,
            num_layers: 19,
            num_single_layers: 38,
            num_attention_heads: 24,
            attention_head_dim: 128,
            joint_attention_dim: 4096,
            axes_dims_rope: vec![16, 56, 56],
            approximator_num_channels: 64,
            approximator_hidden_dim: 5120,
            approximator_layers: 5,
        }
    }
}

impl Configuration for ChromaConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let default = Self::default();
        let mut fields = Fields::new(ChromaTransformer::CLASS_NAME, map);
        // Squares of 2 × 2 latent pixels are made tokens before the transformer, so its patch is 1 token.
        fields.only(&[("patch_size", json!(1))])?;
        let in_channels = fields.size("in_channels", Some(default.in_channels))?;
        let has_axes = map.contains_key("axes_dims_rope");
        let config = Self {
            out_channels: fields.size("out_channels", Some(in_channels))?,
            num_layers: fields.size("num_layers", Some(default.num_layers))?,
            num_single_layers: fields.size("num_single_layers", Some(default.num_single_layers))?,
            num_attention_heads: fields.size("num_attention_heads", Some(default.num_attention_heads))?,
            attention_head_dim: fields.size("attention_head_dim", Some(default.attention_head_dim))?,
            joint_attention_dim: fields.size("joint_attention_dim", Some(default.joint_attention_dim))?,
            axes_dims_rope: if has_axes { fields.list("axes_dims_rope")? } else { default.axes_dims_rope },
            approximator_num_channels: fields
                .size("approximator_num_channels", Some(default.approximator_num_channels))?,
            approximator_hidden_dim: fields.size("approximator_hidden_dim", Some(default.approximator_hidden_dim))?,
            approximator_layers: fields.size("approximator_layers", Some(default.approximator_layers))?,
            in_channels,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": ChromaTransformer::CLASS_NAME,
            "patch_size": 1,
            "in_channels": self.in_channels,
            // null stands for `in_channels`.
            "out_channels": (self.out_channels != self.in_channels).then_some(self.out_channels),
            "num_layers": self.num_layers,
            "num_single_layers": self.num_single_layers,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "joint_attention_dim": self.joint_attention_dim,
            "axes_dims_rope": self.axes_dims_rope,
            "approximator_num_channels": self.approximator_num_channels,
            "approximator_hidden_dim": self.approximator_hidden_dim,
            "approximator_layers": self.approximator_layers,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl ChromaConfig {
    /// Check that `approximator_num_channels` is a multiple of 8, and that `axes_dims_rope` fits `attention_head_dim`.
    ///
    /// # Errors
    /// [`Error::Config`] with the field's name and the values that are allowed.
    pub fn validate(&self) -> Result<()> {
        let (model, channels) = (ChromaTransformer::CLASS_NAME, self.approximator_num_channels);
        if !channels.is_multiple_of(8) {
            return Err(Error::Config(format!(
                "{model}: approximator_num_channels is {channels}, expected a multiple of 8"
            )));
        }
        RopeAxes::check(model, &self.axes_dims_rope, self.attention_head_dim)
    }

    /// Number of features of a token.
    pub const fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// The sizes of a transformer block.
    pub const fn block(&self) -> BlockSizes {
        BlockSizes {
            heads: self.num_attention_heads,
            head_dim: self.attention_head_dim,
            qk_norm: true,
            bias: true,
            eps: EPS,
        }
    }

    /// The sizes of the approximator, the network that computes the modulation.
    pub(super) const fn approximator(&self) -> ApproximatorSizes {
        ApproximatorSizes {
            channels: self.approximator_num_channels,
            width: self.approximator_hidden_dim,
            layers: self.approximator_layers,
            doubles: self.num_layers,
            singles: self.num_single_layers,
            dim: self.inner_dim(),
        }
    }
}
