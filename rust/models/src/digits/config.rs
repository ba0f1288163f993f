//! The sizes of a digits transformer, the demo's small diffusion transformer for images of handwritten digits.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use trainable_candle_core::{Error, Result};

use crate::pretrained::Configuration;

/// `config.json` of a digits transformer. The default values describe the model that ships in the package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DigitsConfig {
    /// The name of the model's class.
    pub _class_name: String,
    /// Height and width of an image in pixels; a multiple of `patch_size`.
    pub sample_size: usize,
    /// Height and width in pixels of a patch. Each patch becomes one token.
    pub patch_size: usize,
    /// Number of channels of an image.
    pub in_channels: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of attention heads of each block.
    pub num_attention_heads: usize,
    /// Width of each head. The width of the tokens is the number of heads times this width.
    pub attention_head_dim: usize,
    /// Width of the feed-forward network's hidden layer, as a multiple of the width of the tokens.
    pub mlp_ratio: usize,
    /// Number of features of a timestep's sinusoidal embedding, half of them sines and half cosines; even.
    pub frequency_embedding_size: usize,
    /// Number of classes.
    pub num_classes: usize,
}

impl Default for DigitsConfig {
    fn default() -> Self {
        Self {
            _class_name: super::DigitsTransformer::CLASS_NAME.into(),
            sample_size: 8,
            patch_size: 2,
            in_channels: 1,
            num_layers: 3,
            num_attention_heads: 3,
            attention_head_dim: 32,
            mlp_ratio: 3,
            frequency_embedding_size: 64,
            num_classes: 10,
        }
    }
}

impl Configuration for DigitsConfig {
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        serde_json::from_value(Value::Object(map.clone())).map_err(|e| Error::Config(e.to_string()))
    }

    fn to_json(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => Map::new(),
        }
    }
}

impl DigitsConfig {
    /// Width of the tokens.
    pub const fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Number of patches along one side of an image.
    pub const fn grid(&self) -> usize {
        self.sample_size / self.patch_size
    }

    /// Number of values in one patch: the number of pixels times the number of channels.
    pub const fn patch_dim(&self) -> usize {
        self.patch_size * self.patch_size * self.in_channels
    }

    /// Check every size.
    ///
    /// # Errors
    /// [`Error::Config`] if a size is wrong. The message names the field, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("sample_size", self.sample_size),
            ("patch_size", self.patch_size),
            ("in_channels", self.in_channels),
            ("num_layers", self.num_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("mlp_ratio", self.mlp_ratio),
            ("frequency_embedding_size", self.frequency_embedding_size),
            ("num_classes", self.num_classes),
        ];
        // The limit is far above any sensible size, and low enough that a product of three sizes does not overflow.
        const LARGEST: usize = 1 << 16;
        if let Some((name, size)) = sizes.iter().find(|(_, size)| !(1..=LARGEST).contains(size)) {
            return Err(Error::Config(format!("DigitsTransformer: {name} is {size}, expected 1 to {LARGEST}")));
        }
        if !self.sample_size.is_multiple_of(self.patch_size) {
            return Err(Error::Config(format!(
                "DigitsTransformer: sample_size {} is not a multiple of patch_size {}",
                self.sample_size, self.patch_size
            )));
        }
        if !self.frequency_embedding_size.is_multiple_of(2) {
            return Err(Error::Config(format!(
                "DigitsTransformer: frequency_embedding_size is {}, expected an even number",
                self.frequency_embedding_size
            )));
        }
        Ok(())
    }
}
