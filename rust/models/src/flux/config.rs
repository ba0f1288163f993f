//! The sizes of a Flux transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::FluxTransformer;
use crate::fields::Fields;
use crate::layers::joint::{BlockSizes, EPS, RopeAxes};
use crate::pretrained::Configuration;

/// `config.json` of a transformer as diffusers writes it (`FluxTransformer2DModel`). The values of `Default` are
/// Flux.1-dev's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FluxConfig {
    /// Number of values of an image token: four times the number of latent channels, because a token is a patch of
    /// 2 × 2 latents.
    pub in_channels: usize,
    /// Number of values that the model predicts for each image token.
    pub out_channels: usize,
    /// Number of double-stream blocks: image and text tokens have separate weights and attend jointly.
    pub num_layers: usize,
    /// Number of single-stream blocks: image and text tokens have the same weights.
    pub num_single_layers: usize,
    /// Number of attention heads of each block.
    pub num_attention_heads: usize,
    /// Width of each head. The width of the tokens is the number of heads times this width.
    pub attention_head_dim: usize,
    /// Width of the text encoder's tokens.
    pub joint_attention_dim: usize,
    /// Width of the pooled text embedding.
    pub pooled_projection_dim: usize,
    /// Whether the model takes a guidance scale as an input. Flux.1-dev does, Flux.1-schnell does not.
    pub guidance_embeds: bool,
    /// For each axis of a token's position: the number of features of a head that the rotary embedding rotates by the
    /// position along this axis.
    pub axes_dims_rope: Vec<usize>,
}

impl Default for FluxConfig {
    fn default() -> Self {
        Self {
            in_channels: 64,
            out_channels: 64,
            num_layers: 19,
            num_single_layers: 38,
            num_attention_heads: 24,
            attention_head_dim: 128,
            joint_attention_dim: 4096,
            pooled_projection_dim: 768,
            guidance_embeds: true,
            axes_dims_rope: vec![16, 56, 56],
        }
    }
}

impl Configuration for FluxConfig {
    /// Missing fields have diffusers' defaults. Unlike in [`FluxConfig::default`], `guidance_embeds` is then false.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(FluxTransformer::CLASS_NAME, map);
        // The transformer does not divide its inputs into patches: each token is a patch of latents already.
        fields.only(&[("patch_size", json!(1))])?;
        let in_channels = fields.size("in_channels", Some(64))?;
        let axes = if map.contains_key("axes_dims_rope") { fields.list("axes_dims_rope")? } else { vec![16, 56, 56] };
        let config = Self {
            out_channels: fields.size("out_channels", Some(in_channels))?,
            num_layers: fields.size("num_layers", Some(19))?,
            num_single_layers: fields.size("num_single_layers", Some(38))?,
            num_attention_heads: fields.size("num_attention_heads", Some(24))?,
            attention_head_dim: fields.size("attention_head_dim", Some(128))?,
            joint_attention_dim: fields.size("joint_attention_dim", Some(4096))?,
            pooled_projection_dim: fields.size("pooled_projection_dim", Some(768))?,
            guidance_embeds: fields.flag("guidance_embeds", false)?,
            axes_dims_rope: axes,
            in_channels,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        // As in diffusers, `out_channels` is null if it equals `in_channels`.
        let json = json!({
            "_class_name": FluxTransformer::CLASS_NAME,
            "patch_size": 1,
            "in_channels": self.in_channels,
            "out_channels": (self.out_channels != self.in_channels).then_some(self.out_channels),
            "num_layers": self.num_layers,
            "num_single_layers": self.num_single_layers,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "joint_attention_dim": self.joint_attention_dim,
            "pooled_projection_dim": self.pooled_projection_dim,
            "guidance_embeds": self.guidance_embeds,
            "axes_dims_rope": self.axes_dims_rope,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl FluxConfig {
    /// The message for a configuration of one of Flux's tools. Their transformers also read another image or a mask, so
    /// they read more values per token than they predict. `None` for Flux itself.
    pub fn tool_message(&self) -> Option<String> {
        (self.in_channels != self.out_channels).then(|| {
            format!(
                "the transformer reads {} values per token and predicts {}: it is one of Flux's tools (Fill, Canny, \
                 Depth), which are not supported",
                self.in_channels, self.out_channels
            )
        })
    }

    /// Check that the model is Flux itself, and that `axes_dims_rope` fits `attention_head_dim`.
    ///
    /// # Errors
    /// [`Error::Config`] with the [`tool_message`](Self::tool_message), if there
    /// is one; otherwise as [`RopeAxes::check`].
    pub fn validate(&self) -> Result<()> {
        if let Some(message) = self.tool_message() {
            return Err(Error::Config(format!("{}: {message}", FluxTransformer::CLASS_NAME)));
        }
        RopeAxes::check(FluxTransformer::CLASS_NAME, &self.axes_dims_rope, self.attention_head_dim)
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
