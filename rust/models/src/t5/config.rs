//! The configuration of a T5 text encoder: sizes, buckets of relative attention, form of the feed-forward networks.

use serde_json::{Map, Value, json};
use trainable_candle_core::{Error, Result};

use super::T5Encoder;
use crate::fields::Fields;
use crate::pretrained::Configuration;

/// The form of the feed-forward networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// T5 1.1: `wo(gelu(wi_0 x) · wi_1 x)` with the tanh form of GELU and an elementwise product. `wi_0`, `wi_1` and
    /// `wo` are linear layers.
    GatedGelu,
    /// T5 1.0: `wo(relu(wi x))` with the linear layers `wi` and `wo`.
    Relu,
}

/// The names of the forms in `config.json`.
const FEED_FORWARD: [(&str, FeedForward); 2] = [("gated-gelu", FeedForward::GatedGelu), ("relu", FeedForward::Relu)];

/// `config.json` of an encoder as transformers writes it (`T5EncoderModel`). The default is T5 1.1 XXL.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// Number of tokens of the vocabulary: the rows of the embedding.
    pub vocab_size: usize,
    /// Number of features of each token.
    pub d_model: usize,
    /// Number of features of each query, key and value of one head. `num_heads · d_kv` may differ from `d_model`.
    pub d_kv: usize,
    /// Number of hidden features of the feed-forward networks.
    pub d_ff: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of heads of each attention.
    pub num_heads: usize,
    /// Number of buckets. A bucket is a range of distances between query and key that share one bias per head. Half of
    /// the buckets are for keys at or before the query, half for keys after it.
    pub relative_attention_num_buckets: usize,
    /// All distances of at least this many tokens share the last bucket of their direction.
    pub relative_attention_max_distance: usize,
    /// Added to the mean square in the norms.
    pub layer_norm_epsilon: f64,
    /// The form of the feed-forward networks.
    pub feed_forward_proj: FeedForward,
}

impl Default for T5Config {
    fn default() -> Self {
        Self {
            vocab_size: 32128,
            d_model: 4096,
            d_kv: 64,
            d_ff: 10240,
            num_layers: 24,
            num_heads: 64,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            layer_norm_epsilon: 1e-6,
            feed_forward_proj: FeedForward::GatedGelu,
        }
    }
}

impl Configuration for T5Config {
    // All other fields are ignored: those that transformers writes are about initial values, generation or the decoder.
    // A missing field gets transformers' default, which is not always that of `T5Config::default`.
    fn from_json(map: &Map<String, Value>) -> Result<Self> {
        let mut fields = Fields::new(T5Encoder::CLASS_NAME, map);
        let form = fields.text("feed_forward_proj").unwrap_or("relu");
        let Some(&(_, feed_forward_proj)) = FEED_FORWARD.iter().find(|(name, _)| *name == form) else {
            return Err(fields.wrong("feed_forward_proj", "\"gated-gelu\" or \"relu\""));
        };
        let config = Self {
            vocab_size: fields.size("vocab_size", Some(32128))?,
            d_model: fields.size("d_model", Some(512))?,
            d_kv: fields.size("d_kv", Some(64))?,
            d_ff: fields.size("d_ff", Some(2048))?,
            num_layers: fields.size("num_layers", Some(6))?,
            num_heads: fields.size("num_heads", Some(8))?,
            relative_attention_num_buckets: fields.size("relative_attention_num_buckets", Some(32))?,
            relative_attention_max_distance: fields.size("relative_attention_max_distance", Some(128))?,
            layer_norm_epsilon: fields.number("layer_norm_epsilon", Some(1e-6))?,
            feed_forward_proj,
        };
        config.validate()?;
        Ok(config)
    }

    fn to_json(&self) -> Map<String, Value> {
        // `FEED_FORWARD` has every form, so the default "" is never used.
        let form = FEED_FORWARD.iter().find(|(_, form)| *form == self.feed_forward_proj).map_or("", |(name, _)| *name);
        let json = json!({
            "architectures": [T5Encoder::CLASS_NAME],
            "model_type": "t5",
            "is_encoder_decoder": false,
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_kv": self.d_kv,
            "d_ff": self.d_ff,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "relative_attention_num_buckets": self.relative_attention_num_buckets,
            "relative_attention_max_distance": self.relative_attention_max_distance,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "feed_forward_proj": form,
        });
        if let Value::Object(map) = json { map } else { Map::new() }
    }
}

impl T5Config {
    /// Number of features of the queries of all heads together. Keys and values have as many.
    pub const fn inner_dim(&self) -> usize {
        self.num_heads * self.d_kv
    }

    /// Check the two fields about relative attention: [`bucket`](super::bucket) needs at least 4 buckets, and a maximum
    /// distance of more than a quarter of their number.
    ///
    /// # Errors
    /// [`Error::Config`] that names the wrong field and the values it may have.
    pub fn validate(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Config(format!("{}: {text}", T5Encoder::CLASS_NAME)));
        let buckets = self.relative_attention_num_buckets;
        if buckets < 4 {
            return wrong(format!("relative_attention_num_buckets is {buckets}, expected 4 or more"));
        }
        // Each direction has half of the buckets. Half of these, `exact`, are for one distance each; farther distances
        // share the others.
        let (furthest, exact) = (self.relative_attention_max_distance, buckets / 4);
        if furthest <= exact {
            return wrong(format!(
                "relative_attention_max_distance is {furthest}, expected more than {exact}, a quarter of \
                 relative_attention_num_buckets"
            ));
        }
        Ok(())
    }
}
