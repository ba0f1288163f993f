//! The configuration of a Qwen-Image transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::QwenImageTransformer;
use crate::fields::Fields;
use crate::layers::joint::{BlockSizes, EPS, RopeAxes};
use crate::pretrained::Configuration;

/// The `config.json` of a transformer as diffusers writes it (`QwenImageTransformer2DModel`). The default values are
/// those of the published model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QwenImageConfig {
    /// Number of values of an image token. A token is a patch of 2 × 2 latents, so this is four times the number of
    /// channels of the latents.
    pub in_channels: usize,
    /// Number of channels of the predicted latents.
    pub out_channels: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of attention heads of each block.
    pub num_attention_heads: usize,
    /// Width of each head. The width of the tokens is the number of heads times this width.
    pub attention_head_dim: usize,
    /// Width of the text encoder's tokens.
    pub joint_attention_dim: usize,
    /// For each axis of a token's position: the number of features of a head that the rotary embedding rotates by the
    /// position along this axis.
    pub axes_dims_rope: Vec<usize>,
}

impl Default for QwenImageConfig {
    fn default() -> Self {
        Self {
            in_channels: 64,
            out_channels: 16,
            num_layers: 60,
            num_attention_heads: 24,
            attention_head_dim: 128,
            joint_attention_dim: 3584,
            axes_dims_rope: vec![16, 56, 56],
        }
    }
}

/// Number of latents along one side of the square patch that becomes a token.
pub(super) const PATCH: usize = 2;

/// Fields that are true only in the configurations of related models, with descriptions of these models.
const RELATIVES: [(&str, &str); 3] = [
    ("zero_cond_t", "Qwen-Image-Edit-2511, which reads images besides the text"),
    ("use_additional_t_cond", "Qwen-Image-Layered, which draws several layers"),
    ("use_layer3d_rope", "Qwen-Image-Layered, which draws several layers"),
];

impl Configuration for QwenImageConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let is_true = |field: &str| map.get(field).and_then(Value::as_bool) == Some(true);
        if let Some((field, relative)) = RELATIVES.iter().find(|(field, _)| is_true(field)) {
            let class = QwenImageTransformer::CLASS_NAME;
            return Err(Error::Config(format!(
                "{class}: {field} is true: the transformer is {relative}; it is not supported, expected Qwen-Image"
            )));
        }
        let mut fields = Fields::new(QwenImageTransformer::CLASS_NAME, map);
        // These fields may have no other value.
        fields.only(&[("patch_size", json!(PATCH)), ("guidance_embeds", json!(false))])?;
        let standard = Self::default();
        let axes =
            if map.contains_key("axes_dims_rope") { fields.list("axes_dims_rope")? } else { standard.axes_dims_rope };
        let config = Self {
            in_channels: fields.size("in_channels", Some(standard.in_channels))?,
            out_channels: fields.size("out_channels", Some(standard.out_channels))?,
            num_layers: fields.size("num_layers", Some(standard.num_layers))?,
            num_attention_heads: fields.size("num_attention_heads", Some(standard.num_attention_heads))?,
            attention_head_dim: fields.size("attention_head_dim", Some(standard.attention_head_dim))?,
            joint_attention_dim: fields.size("joint_attention_dim", Some(standard.joint_attention_dim))?,
            axes_dims_rope: axes,
        };
        // diffusers 0.35 wrote this field, but its model did not read it.
        fields.ignore(&["pooled_projection_dim"]);
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": QwenImageTransformer::CLASS_NAME,
            "patch_size": PATCH,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "num_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "joint_attention_dim": self.joint_attention_dim,
            "guidance_embeds": false,
            "axes_dims_rope": self.axes_dims_rope,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl QwenImageConfig {
    /// Check that `axes_dims_rope` fits `attention_head_dim`.
    ///
    /// # Errors
    /// As [`RopeAxes::check`].
    pub fn validate(&self) -> Result<()> {
        RopeAxes::check(QwenImageTransformer::CLASS_NAME, &self.axes_dims_rope, self.attention_head_dim)
    }

    /// Width of the tokens.
    pub const fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// The sizes of a block.
    pub const fn block(&self) -> BlockSizes {
        BlockSizes {
            heads: self.num_attention_heads,
            head_dim: self.attention_head_dim,
            qk_norm: true,
            bias: true,
            eps: EPS,
        }
    }
}
