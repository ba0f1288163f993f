//! The configuration of a CLIP text encoder.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::CLIPTextModel;
use crate::fields::Fields;
use crate::pretrained::Configuration;

/// The activation between the two linear layers of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(1.702 x), as in OpenAI's CLIP.
    QuickGelu,
    /// The exact GELU, as in OpenCLIP.
    Gelu,
}

/// The activations with their names in `hidden_act`.
const ACTIVATIONS: [(&str, Activation); 2] = [("quick_gelu", Activation::QuickGelu), ("gelu", Activation::Gelu)];

/// `config.json` of a text encoder as transformers writes it (`CLIPTextModel`, `CLIPTextModelWithProjection`). The
/// default is the configuration of SDXL's first text encoder, CLIP ViT-L.
#[derive(Clone, Debug, PartialEq)]
pub struct CLIPTextConfig {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Number of features of a token's hidden state.
    pub hidden_size: usize,
    /// Number of features of the hidden layer of the feed-forward networks.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of heads of each attention, a divisor of `hidden_size`.
    pub num_attention_heads: usize,
    /// The largest number of tokens of a text, the start and end tokens included.
    pub max_position_embeddings: usize,
    /// The activation of the feed-forward networks.
    pub hidden_act: Activation,
    /// The epsilon that the norms add to the variance.
    pub layer_norm_eps: f64,
    /// The id of the end token, whose hidden state represents the text. If this is 2, as in OpenAI's files, the token
    /// with the largest id in the text is the end token.
    pub eos_token_id: u32,
    /// Number of features to which the end token's state is projected. `None` if the model has no projection.
    pub projection_dim: Option<usize>,
}

impl Default for CLIPTextConfig {
    fn default() -> Self {
        Self {
            vocab_size: 49408,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            max_position_embeddings: 77,
            hidden_act: Activation::QuickGelu,
            layer_norm_eps: 1e-5,
            eos_token_id: 2,
            projection_dim: None,
        }
    }
}

impl Configuration for CLIPTextConfig {
    // Fields that are not read here are ignored: those that transformers writes are about initial values, generation or
    // CLIP's vision encoder. A missing field gets transformers' default.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(CLIPTextModel::CLASS_NAME, map);
        let has_projection = map
            .get("architectures")
            .and_then(Value::as_array)
            .is_some_and(|names| names.iter().any(|name| name.as_str() == Some(super::PROJECTING_CLASS_NAME)));
        let act = fields.text("hidden_act").unwrap_or("quick_gelu");
        let Some(&(_, hidden_act)) = ACTIVATIONS.iter().find(|(name, _)| *name == act) else {
            return Err(fields.wrong("hidden_act", "\"quick_gelu\" or \"gelu\""));
        };
        let eos = match map.get("eos_token_id") {
            None | Some(Value::Null) => Some(49407),
            Some(value) => value.as_u64().and_then(|id| u32::try_from(id).ok()),
        };
        let config = Self {
            vocab_size: fields.size("vocab_size", Some(49408))?,
            hidden_size: fields.size("hidden_size", Some(512))?,
            intermediate_size: fields.size("intermediate_size", Some(2048))?,
            num_hidden_layers: fields.size("num_hidden_layers", Some(12))?,
            num_attention_heads: fields.size("num_attention_heads", Some(8))?,
            max_position_embeddings: fields.size("max_position_embeddings", Some(77))?,
            hidden_act,
            layer_norm_eps: fields.number("layer_norm_eps", Some(1e-5))?,
            eos_token_id: eos.ok_or_else(|| fields.wrong("eos_token_id", "the id of a token"))?,
            projection_dim: has_projection.then(|| fields.size("projection_dim", Some(512))).transpose()?,
        };
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        // Every activation is in `ACTIVATIONS`, so "" is never written.
        let act = ACTIVATIONS.iter().find(|(_, act)| *act == self.hidden_act).map_or("", |(name, _)| *name);
        let class = match self.projection_dim {
            Some(_) => super::PROJECTING_CLASS_NAME,
            None => CLIPTextModel::CLASS_NAME,
        };
        // transformers ignores `projection_dim` in the configuration of a model without a projection.
        let projection_dim = self.projection_dim.unwrap_or(self.hidden_size);
        let json = json!({
            "architectures": [class],
            "model_type": "clip_text_model",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": act,
            "layer_norm_eps": self.layer_norm_eps,
            "eos_token_id": self.eos_token_id,
            "projection_dim": projection_dim,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl CLIPTextConfig {
    /// Check that `num_attention_heads` divides `hidden_size`.
    ///
    /// # Errors
    /// [`Error::Config`] if it does not.
    pub fn validate(&self) -> Result<()> {
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(Error::Config(format!(
                "{}: num_attention_heads is {}, expected a divisor of hidden_size, {}",
                CLIPTextModel::CLASS_NAME,
                self.num_attention_heads,
                self.hidden_size
            )));
        }
        Ok(())
    }
}
