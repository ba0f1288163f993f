//! The names of a decoder's parameters in files: transformers' names, with or without the prefix `model.`, or with
//! Qwen2.5-VL's prefix `model.language_model.` in its place.

use serde_json::{Value, json};
use trainable_candle_core::{Error, Result};
use trainable_candle_io::WeightFiles;

use super::CausalLMConfig;
use super::config::Family;
use crate::pretrained::{CheckpointNaming, Configuration, Key, Layout};

/// The name of the embedding of tokens.
pub(super) const EMBEDDING: &str = "model.embed_tokens";
/// The name of the list of layers.
pub(super) const LAYERS: &str = "model.layers";
/// The name of the final norm.
pub(super) const NORM: &str = "model.norm";
/// The name of the language-model head.
pub(super) const HEAD: &str = "lm_head";
/// The prefix of all names except that of the language-model head. Files of a model without this head may omit the
/// prefix.
const BODY: &str = "model.";
/// The prefix that replaces [`BODY`] in files of Qwen2.5-VL that transformers 5 wrote.
const VL_BODY: &str = "model.language_model.";
/// The beginning, after [`BODY`], of the keys of Qwen2.5-VL's vision encoder.
const VISUAL: &str = "visual.";

/// The name of the parameter that holds the matrix `name`.
pub(super) fn weight_of(name: &str) -> String {
    format!("{name}.weight")
}

/// The names of a decoder's parameters in the files of a folder (`checkpoint` is `None`), or in one file that may hold
/// other models too. In such a file, the prefix `checkpoint.prefix` precedes each name.
pub(super) fn layout(config: &CausalLMConfig, checkpoint: Option<CheckpointNaming>) -> Box<dyn Layout> {
    Box::new(Transformers {
        prefix: checkpoint.map_or("", |checkpoint| checkpoint.prefix),
        layers: config.num_hidden_layers,
        is_part: config.is_part(),
        has_head: config.has_own_head(),
        is_vl: config.is_vl(),
    })
}

/// transformers' names.
struct Transformers {
    /// The prefix of the model's keys in a file that holds other models too, otherwise empty.
    prefix: &'static str,
    /// The model's number of layers.
    layers: usize,
    /// Whether the files have more layers than the model. Such a model has no final norm and no language-model head.
    is_part: bool,
    /// Whether the model has a language-model head whose matrix is not that of the embedding.
    has_head: bool,
    /// Whether the files have Qwen2.5-VL's names.
    is_vl: bool,
}

impl Layout for Transformers {
    fn prefix(&self) -> &str {
        self.prefix
    }

    fn keys(&self, name: &str) -> Vec<Key> {
        // The name without `model.`, and with `model.language_model.` in its place.
        let inside = name.strip_prefix(BODY);
        let nested = inside.filter(|_| self.is_vl).map(|inside| Key::plain(format!("{VL_BODY}{inside}")));
        std::iter::once(name).chain(inside).map(Key::plain).chain(nested).collect()
    }

    /// Whether readers skip the tensor `key`. They skip rotary frequencies, which are computed, and Qwen2.5-VL's vision
    /// encoder. They skip the language-model head if the model has none of its own. If the files have more layers than
    /// the model, they also skip the final norm and the further layers.
    fn ignores(&self, key: &str) -> bool {
        let of_vl = key.strip_prefix(VL_BODY).filter(|_| self.is_vl);
        let key = of_vl.or_else(|| key.strip_prefix(BODY)).unwrap_or(key);
        let layer = key.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        key.ends_with("rotary_emb.inv_freq")
            || (key.strip_suffix(".weight") == Some(HEAD) && !self.has_head)
            || (self.is_vl && key.starts_with(VISUAL))
            || (self.is_part && (key == "norm.weight" || layer.is_some_and(|layer| layer >= self.layers)))
    }
}

/// The configuration of a decoder in a file without `config.json`, where the prefix `checkpoint.prefix` precedes the
/// decoder's names. The result is the first of `known` whose `vocab_size`, `hidden_size`, `intermediate_size` and
/// `num_hidden_layers` are those of the file's tensors. (In general, the tensors' shapes determine neither the number
/// of heads nor the rotary frequencies.) If none has these sizes and the file holds a Qwen3, the result is the first
/// Qwen3 in `known`, with all sizes replaced by those of the file's tensors.
///
/// # Errors
/// [`Error::Config`] if none of `known` has these sizes, and the file holds no Qwen3 or `known` has none.
pub(super) fn deduce(
    files: &WeightFiles,
    checkpoint: CheckpointNaming,
    known: Vec<CausalLMConfig>,
) -> Result<CausalLMConfig> {
    let shape = |name: &str| {
        // The family is not known yet, so all prefixes are tried.
        let inside = name.strip_prefix(BODY);
        let nested = inside.map(|inside| format!("{VL_BODY}{inside}"));
        let mut keys = std::iter::once(name).chain(inside).map(str::to_owned).chain(nested);
        keys.find_map(|name| files.shape(&format!("{}{name}", checkpoint.prefix)))
    };
    let layers = (0..).take_while(|i| shape(&format!("{LAYERS}.{i}.mlp.down_proj.weight")).is_some()).count();
    let fits = |config: &CausalLMConfig| {
        shape(&weight_of(EMBEDDING)) == Some(&[config.vocab_size, config.hidden_size])
            && shape(&format!("{LAYERS}.0.mlp.down_proj.weight"))
                == Some(&[config.hidden_size, config.intermediate_size])
            && config.num_hidden_layers == layers
    };
    let qwen3 = known.iter().find(|config| config.family == Family::Qwen3).cloned();
    let resized_qwen3 = || resized(&qwen3?, layers, shape);
    known.into_iter().find(fits).or_else(resized_qwen3).ok_or_else(|| {
        Error::Config(format!(
            "{}: the sizes of the checkpoint's tensors are those of no known language model, and the tensors' shapes \
             do not determine the number of heads; put the model's config.json beside the file, or give its path as \
             config=",
            files.path().display()
        ))
    })
}

/// `known`, the configuration of a Qwen3, with its sizes replaced by those of another Qwen3's tensors. For a Qwen3, the
/// tensors determine all sizes: the norm of the queries has the width of a head. The other fields are the same for all
/// published models (0.6B to 32B). `None` if the tensors are not those of a Qwen3, or if the sizes do not fit one
/// another.
fn resized<'a>(
    known: &CausalLMConfig,
    layers: usize,
    shape: impl Fn(&str) -> Option<&'a [usize]>,
) -> Option<CausalLMConfig> {
    let of_layer = |name: &str| shape(&weight_of(&format!("{LAYERS}.0.{name}")));
    let &[width] = of_layer("self_attn.q_norm")? else { return None };
    let heads = |name: &str| of_layer(name)?.first()?.checked_div(width);
    let &[tokens, hidden] = shape(&weight_of(EMBEDDING))? else { return None };
    let sizes = json!({
        "vocab_size": tokens,
        "hidden_size": hidden,
        "intermediate_size": of_layer("mlp.up_proj")?.first()?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads("self_attn.q_proj")?,
        "num_key_value_heads": heads("self_attn.k_proj")?,
        "head_dim": width,
        "tie_word_embeddings": shape(&weight_of(HEAD)).is_none(),
    });
    let Value::Object(sizes) = sizes else { return None };
    let mut json = known.to_json();
    json.extend(sizes);
    CausalLMConfig::from_json(&json).ok()
}
