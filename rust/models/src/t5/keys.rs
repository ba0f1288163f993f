//! The names of an encoder's parameters in files: transformers', everywhere.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::{FeedForward, T5Config};
use crate::pretrained::{Key, Layout, Original};

/// The embedding's name, which is the model's own, and the one that the encoder knows it by; files have either or both.
const EMBEDDINGS: [&str; 2] = ["shared.weight", "encoder.embed_tokens.weight"];

/// The names in a folder, or after the prefix of a file that holds other models too.
pub(super) fn layout(original: Option<Original>) -> Box<dyn Layout> {
    Box::new(Transformers { prefix: original.map_or("", |original| original.prefix) })
}

struct Transformers {
    prefix: &'static str,
}

impl Layout for Transformers {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn places(&self, name: &str) -> Vec<Key> {
        if name == EMBEDDINGS[0] {
            return EMBEDDINGS.map(Key::plain).to_vec();
        }
        vec![Key::plain(name)]
    }

    /// The embedding's second copy, and the decoder.
    fn ignores(&self, key: &str) -> bool {
        EMBEDDINGS.contains(&key) || key.starts_with("decoder.") || key == "lm_head.weight"
    }
}

/// The configuration of an encoder in a file, from the shapes of its tensors. What leaves no trace in them is T5's in all its sizes,
/// or come from the first of the `known` configurations whose sizes are these.
///
/// # Errors
/// [`Error::Config`] if a size cannot be determined.
pub(super) fn deduce(files: &WeightFiles, original: Original, known: Vec<T5Config>) -> Result<T5Config> {
    let matrix = |key: &str| match files.shape(&format!("{}{key}", original.prefix)) {
        Some(&[rows, columns]) => Ok((rows, columns)),
        _ => Err(Error::Config(format!(
            "{}: the shapes of the checkpoint do not tell the size of {key}; give config=, the config.json of the text encoder",
            files.path().display()
        ))),
    };
    let query = |block: usize| matrix(&format!("encoder.block.{block}.layer.0.SelfAttention.q.weight"));
    let middle = |name: &str| matrix(&format!("encoder.block.0.layer.1.DenseReluDense.{name}.weight"));
    let (vocab_size, d_model) = matrix(EMBEDDINGS[0]).or_else(|_| matrix(EMBEDDINGS[1]))?;
    let (buckets, heads) = matrix("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")?;
    let (feed_forward_proj, d_ff) = match middle("wi_0") {
        Ok((rows, _)) => (FeedForward::GatedGelu, rows),
        Err(_) => (FeedForward::Relu, middle("wi")?.0),
    };
    let deduced = T5Config {
        vocab_size,
        d_model,
        d_kv: query(0)?.0 / heads.max(1),
        d_ff,
        num_layers: (0..).take_while(|&block| query(block).is_ok()).count(),
        num_heads: heads,
        relative_attention_num_buckets: buckets,
        feed_forward_proj,
        ..T5Config::default()
    };
    let agrees = |known: &T5Config| {
        let &T5Config { relative_attention_max_distance, layer_norm_epsilon, .. } = known;
        T5Config { relative_attention_max_distance, layer_norm_epsilon, ..deduced.clone() } == *known
    };
    Ok(known.into_iter().find(agrees).unwrap_or(deduced))
}
