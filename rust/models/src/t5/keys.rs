//! The names of the parameters of a T5 encoder in files: transformers' names, and llama.cpp's names in GGUF files.

use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::{FeedForward, T5Config};
use crate::pretrained::{CheckpointNaming, Key, Layout, Naming};

/// The two names of the token embedding in files: the name of the table that encoder and decoder share, which is also
/// the model's own name, and the name of the encoder's table. A file has one of the names or both.
const EMBEDDINGS: [&str; 2] = ["shared.weight", "encoder.embed_tokens.weight"];

/// The keys of the encoder's parameters in a transformers folder (`original` is `None`), in a file that holds other
/// models too, or in a GGUF file.
pub(super) fn layout(original: Option<CheckpointNaming>) -> Box<dyn Layout> {
    if original.is_some_and(|original| original.naming == Naming::LlamaCpp) {
        return Box::new(LlamaCpp);
    }
    Box::new(Transformers { prefix: original.map_or("", |original| original.prefix) })
}

struct Transformers {
    prefix: &'static str,
}

impl Layout for Transformers {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        if name == EMBEDDINGS[0] {
            return EMBEDDINGS.map(Key::plain).to_vec();
        }
        vec![Key::plain(name)]
    }

    /// Readers skip a second copy of the embedding, the decoder, and the decoder's output layer.
    fn ignores(&self, key: &str) -> bool {
        EMBEDDINGS.contains(&key) || key.starts_with("decoder.") || key == "lm_head.weight"
    }
}

/// The names of `MODEL_ARCH.T5ENCODER` in
/// <https://github.com/ggml-org/llama.cpp/blob/0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c/gguf-py/gguf/tensor_mapping.py>.
struct LlamaCpp;

impl Layout for LlamaCpp {
    fn keys(&self, name: &str) -> Vec<Key> {
        // Our name and llama.cpp's of each parameter outside of the blocks.
        const OUTSIDE: [(&str, &str); 2] =
            [(EMBEDDINGS[0], "token_embd.weight"), ("encoder.final_layer_norm.weight", "enc.output_norm.weight")];
        // Our name and llama.cpp's of each layer of a block. A block has `wi_0` and `wi_1`, or else `wi`.
        const INSIDE: [(&str, &str); 11] = [
            ("layer.0.SelfAttention.q", "attn_q"),
            ("layer.0.SelfAttention.k", "attn_k"),
            ("layer.0.SelfAttention.v", "attn_v"),
            ("layer.0.SelfAttention.o", "attn_o"),
            ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
            ("layer.0.layer_norm", "attn_norm"),
            ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
            ("layer.1.DenseReluDense.wi_1", "ffn_up"),
            ("layer.1.DenseReluDense.wi", "ffn_up"),
            ("layer.1.DenseReluDense.wo", "ffn_down"),
            ("layer.1.layer_norm", "ffn_norm"),
        ];
        if let Some((_, theirs)) = OUTSIDE.iter().find(|(ours, _)| *ours == name) {
            return vec![Key::plain(*theirs)];
        }
        let inside = || {
            let (block, rest) = name.strip_prefix("encoder.block.")?.split_once('.')?;
            let layer = rest.strip_suffix(".weight")?;
            let (_, theirs) = INSIDE.iter().find(|(ours, _)| *ours == layer)?;
            Some(Key::plain(format!("enc.blk.{block}.{theirs}.weight")))
        };
        inside().into_iter().collect()
    }

    /// Readers skip the decoder and the decoder's output layer.
    fn ignores(&self, key: &str) -> bool {
        key.starts_with("dec.") || key == "output.weight"
    }
}

/// The configuration of an encoder in a file, from the shapes of its tensors. Fields that shapes do not determine come
/// from the first of the `known` configurations that have the deduced sizes, or else from [`T5Config::default`]: T5
/// models of all sizes have the same values in these fields.
///
/// # Errors
/// [`Error::Config`] if a size cannot be determined.
pub(super) fn deduce(files: &WeightFiles, original: CheckpointNaming, known: Vec<T5Config>) -> Result<T5Config> {
    let layout = layout(Some(original));
    let matrix_size = |name: &str| {
        let shape = |key: Key| files.shape(&format!("{}{}", original.prefix, key.key));
        match layout.keys(name).into_iter().find_map(shape) {
            Some(&[rows, columns]) => Ok((rows, columns)),
            _ => Err(Error::Config(format!(
                "{}: the shapes of the checkpoint do not determine the size of {name}; give config=, the path of the \
                 text encoder's config.json",
                files.path().display()
            ))),
        }
    };
    // The sizes are (rows, columns) of the weight.
    let query_size = |block: usize| matrix_size(&format!("encoder.block.{block}.layer.0.SelfAttention.q.weight"));
    let hidden_size = |name: &str| matrix_size(&format!("encoder.block.0.layer.1.DenseReluDense.{name}.weight"));
    let (vocab_size, d_model) = matrix_size(EMBEDDINGS[0])?;
    let (buckets, heads) = matrix_size("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")?;
    let (feed_forward_proj, d_ff) = match hidden_size("wi_0") {
        Ok((rows, _)) => (FeedForward::GatedGelu, rows),
        // Networks without a gate have one layer `wi`.
        Err(_) => (FeedForward::Relu, hidden_size("wi")?.0),
    };
    let deduced = T5Config {
        vocab_size,
        d_model,
        d_kv: query_size(0)?.0 / heads.max(1),
        d_ff,
        num_layers: (0..).take_while(|&block| query_size(block).is_ok()).count(),
        num_heads: heads,
        relative_attention_num_buckets: buckets,
        feed_forward_proj,
        ..T5Config::default()
    };
    // Whether a known configuration equals the deduced one in all fields that shapes determine.
    let agrees = |candidate: &T5Config| {
        let &T5Config { relative_attention_max_distance, layer_norm_epsilon, .. } = candidate;
        T5Config { relative_attention_max_distance, layer_norm_epsilon, ..deduced.clone() } == *candidate
    };
    Ok(known.into_iter().find(agrees).unwrap_or(deduced))
}
