//! The sizes of a FLUX.2 transformer.

use serde_json::{Map, Value, json};
use trainable_candle_core::Result;

use super::Flux2Transformer;
use crate::fields::Fields;
use crate::layers::joint::{BlockSizes, EPS, RopeAxes};
use crate::pretrained::Configuration;

/// `config.json` of a transformer as diffusers writes it (`Flux2Transformer2DModel`). The values of `Default` are
/// FLUX.2-klein-4B's.
#[derive(Clone, Debug, PartialEq)]
pub struct Flux2Config {
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
    /// Whether the model takes a guidance scale as an input; FLUX.2-klein does not.
    pub guidance_embeds: bool,
    /// The base of the rotary embedding's frequencies.
    pub rope_theta: f64,
    /// For each axis of a token's position: the number of features of a head that the rotary embedding rotates by the
    /// position along this axis. The four axes are one on which all tokens of text and image are at 0, the row and the
    /// column of an image token, and the index of a text token.
    pub axes_dims_rope: Vec<usize>,
}

impl Default for Flux2Config {
    fn default() -> Self {
        Self {
            in_channels: 128,
            out_channels: 128,
            num_layers: 5,
            num_single_layers: 20,
            num_attention_heads: 24,
            attention_head_dim: 128,
            joint_attention_dim: 7680,
            guidance_embeds: false,
            rope_theta: 2000.0,
            axes_dims_rope: vec![32; 4],
        }
    }
}

impl Configuration for Flux2Config {
    /// Missing fields have diffusers' defaults: FLUX.2-dev's values, not those of [`Flux2Config::default`].
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(Flux2Transformer::CLASS_NAME, map);
        // Fields of which the model supports only this value. `patch_size` is 1 because the caller makes the patches of
        // 2 × 2 latents: to the model, a patch is one position.
        fields.only(&[
            ("patch_size", json!(1)),
            ("mlp_ratio", json!(3.0)),
            ("eps", json!(EPS)),
            ("timestep_guidance_channels", json!(256)),
        ])?;
        let in_channels = fields.size("in_channels", Some(128))?;
        let axes = if map.contains_key("axes_dims_rope") { fields.list("axes_dims_rope")? } else { vec![32; 4] };
        let config = Self {
            out_channels: fields.size("out_channels", Some(in_channels))?,
            num_layers: fields.size("num_layers", Some(8))?,
            num_single_layers: fields.size("num_single_layers", Some(48))?,
            num_attention_heads: fields.size("num_attention_heads", Some(48))?,
            attention_head_dim: fields.size("attention_head_dim", Some(128))?,
            joint_attention_dim: fields.size("joint_attention_dim", Some(15360))?,
            guidance_embeds: fields.flag("guidance_embeds", true)?,
            rope_theta: fields.number("rope_theta", Some(2000.0))?,
            axes_dims_rope: axes,
            in_channels,
        };
        fields.finish()?;
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        let json = json!({
            "_class_name": Flux2Transformer::CLASS_NAME,
            "patch_size": 1,
            "in_channels": self.in_channels,
            // diffusers writes null if the number is that of `in_channels`.
            "out_channels": (self.out_channels != self.in_channels).then_some(self.out_channels),
            "num_layers": self.num_layers,
            "num_single_layers": self.num_single_layers,
            "num_attention_heads": self.num_attention_heads,
            "attention_head_dim": self.attention_head_dim,
            "joint_attention_dim": self.joint_attention_dim,
            "guidance_embeds": self.guidance_embeds,
            "timestep_guidance_channels": 256,
            "mlp_ratio": 3.0,
            "eps": EPS,
            "rope_theta": self.rope_theta,
            "axes_dims_rope": self.axes_dims_rope,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl Flux2Config {
    /// Check that `axes_dims_rope` fits `attention_head_dim`.
    ///
    /// # Errors
    /// As [`RopeAxes::check`].
    pub fn validate(&self) -> Result<()> {
        RopeAxes::check(Flux2Transformer::CLASS_NAME, &self.axes_dims_rope, self.attention_head_dim)
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
            bias: false,
            eps: EPS,
        }
    }
}
