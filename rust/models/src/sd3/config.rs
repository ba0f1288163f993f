//! The sizes of an SD3 transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::SD3Transformer;
use crate::fields::Fields;
use crate::layers::joint::{BlockSizes, EPS};
use crate::pretrained::Configuration;

/// `config.json` of a transformer as diffusers writes it (`SD3Transformer2DModel`). The default values are
/// SD3.5-medium's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SD3Config {
    /// Height and width of the latents that the model was trained on.
    pub sample_size: usize,
    /// Height and width of the square patch of latents that becomes one token.
    pub patch_size: usize,
    /// Number of channels of the latents.
    pub in_channels: usize,
    /// Number of channels of the prediction.
    pub out_channels: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of attention heads of each block.
    pub num_attention_heads: usize,
    /// Width of each head. The width of the tokens is the number of heads times this width.
    pub attention_head_dim: usize,
    /// Width of the text tokens' features.
    pub joint_attention_dim: usize,
    /// Width of the pooled text features.
    pub pooled_projection_dim: usize,
    /// Height and width, in tokens, of the table of position embeddings.
    pub pos_embed_max_size: usize,
    /// Indices of the blocks that have a second attention, in which image tokens attend to image tokens only.
    pub dual_attention_layers: Vec<usize>,
    /// Whether queries and keys are normalised, as in SD3.5 but not in SD3.
    pub qk_norm: bool,
}

impl Default for SD3Config {
    fn default() -> Self {
        Self {
            sample_size: 128,
            patch_size: 2,
            in_channels: 16,
            out_channels: 16,
            num_layers: 24,
            num_attention_heads: 24,
            attention_head_dim: 64,
            joint_attention_dim: 4096,
            pooled_projection_dim: 2048,
            pos_embed_max_size: 384,
            dual_attention_layers: (0..13).collect(),
            qk_norm: true,
        }
    }
}

/// The value of the field `qk_norm` for normalised queries and keys. Without this norm the field is null.
const QK_NORM: &str = "rms_norm";

impl Configuration for SD3Config {
    // A missing field gets diffusers' default, which is not always that of `SD3Config::default`.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(SD3Transformer::CLASS_NAME, map);
        let in_channels = fields.size("in_channels", Some(16))?;
        let heads = fields.size("num_attention_heads", Some(18))?;
        let head_dim = fields.size("attention_head_dim", Some(64))?;
        let num_layers = fields.size("num_layers", Some(18))?;
        let qk_norm = match fields.text("qk_norm") {
            None => false,
            Some(QK_NORM) => true,
            Some(_) => return Err(fields.wrong("qk_norm", "\"rms_norm\" or null")),
        };
        let width = heads * head_dim;
        if fields.size("caption_projection_dim", Some(width))? != width {
            return Err(fields.wrong("caption_projection_dim", &format!("{width}, the width of the tokens")));
        }
        let config = Self {
            sample_size: fields.size("sample_size", Some(128))?,
            patch_size: fields.size("patch_size", Some(2))?,
            out_channels: fields.size("out_channels", Some(in_channels))?,
            joint_attention_dim: fields.size("joint_attention_dim", Some(4096))?,
            pooled_projection_dim: fields.size("pooled_projection_dim", Some(2048))?,
            pos_embed_max_size: fields.size("pos_embed_max_size", Some(96))?,
            // Each index must be below `num_layers`; without the field, the list is empty.
            dual_attention_layers: fields.indices("dual_attention_layers", num_layers)?,
            in_channels,
            num_layers,
            num_attention_heads: heads,
            attention_head_dim: head_dim,
            qk_norm,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": SD3Transformer::CLASS_NAME,
            "sample_size": self.sample_size,
            "patch_size": self.patch_size,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "num_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "joint_attention_dim": self.joint_attention_dim,
            "caption_projection_dim": self.inner_dim(),
            "pooled_projection_dim": self.pooled_projection_dim,
            "pos_embed_max_size": self.pos_embed_max_size,
            "dual_attention_layers": self.dual_attention_layers,
            "qk_norm": self.qk_norm.then_some(QK_NORM),
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl SD3Config {
    /// Check that the width of the tokens is a multiple of 4.
    ///
    /// # Errors
    /// [`Error::Config`] that names the two fields whose product is this width.
    pub fn validate(&self) -> Result<()> {
        if self.inner_dim().is_multiple_of(4) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{}: attention_head_dim is {} and num_attention_heads is {}, expected a product that is a multiple of 4, \
             because each of the two axes of positions has sines and cosines",
            SD3Transformer::CLASS_NAME,
            self.attention_head_dim,
            self.num_attention_heads
        )))
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
            qk_norm: self.qk_norm,
            bias: true,
            eps: EPS,
        }
    }
}
