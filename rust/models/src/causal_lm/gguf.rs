//! Decoders in GGUF files: llama.cpp's names of tensors, and configurations made from the metadata (*facts*) of files.
//!
//! Follows `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of
//! <https://github.com/ggml-org/llama.cpp/tree/0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c>.

use serde_json::{Map, Value, json};
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::GgufFile;

use super::config::Family;
use super::{CausalLMConfig, keys};
use crate::pretrained::{Configuration, Form, Key, Layout};

/// llama.cpp's names of the supported architectures, each with transformers' `model_type` and class name. Files of
/// Mistral have Llama's name, because llama.cpp computes both in the same way.
const ARCHITECTURES: [(&str, &str, &str); 3] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];

/// The names of the embedding, final norm and head, as (transformers' name, llama.cpp's name). A parameter's name is
/// this name and an ending, such as `.weight`.
const OUTSIDE: [(&str, &str); 3] =
    [(keys::EMBEDDING, "token_embd"), (keys::NORM, "output_norm"), (keys::HEAD, "output")];

/// llama.cpp's name of the embedding's matrix.
const EMBEDDING_KEY: &str = "token_embd.weight";
/// llama.cpp's name of the final norm's scale.
const NORM_KEY: &str = "output_norm.weight";
/// llama.cpp's name of the language-model head's matrix.
const HEAD_KEY: &str = "output.weight";

/// The names of the norms and projections inside a decoder layer, as (transformers' name, llama.cpp's name).
const INSIDE: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The tensor with the numbers by which the rotary frequencies are divided. These divisors become part of the
/// configuration.
const DIVISORS_KEY: &str = "rope_freqs.weight";

/// The names and forms of a decoder's parameters in a GGUF file.
pub(super) fn layout(config: &CausalLMConfig) -> Box<dyn Layout> {
    let heads = match config.family {
        // A rotary embedding rotates pairs of features. For these families llama.cpp pairs neighbouring features, but
        // this library pairs features that are half a head apart. So the query and key projections have their rows in
        // another order in the file.
        Family::Llama | Family::Mistral => Some([config.num_attention_heads, config.num_key_value_heads]),
        Family::Qwen2 | Family::Qwen25Vl | Family::Qwen3 => None,
    };
    let layers = config.num_hidden_layers;
    Box::new(LlamaCpp { heads, layers, is_part: config.is_part(), has_head: config.has_own_head() })
}

/// The layout with llama.cpp's names of the parameters.
struct LlamaCpp {
    /// The numbers of query heads and of key heads if the rows of their projections are interleaved
    /// ([`Form::Interleaved`]), otherwise `None`.
    heads: Option<[usize; 2]>,
    /// The model's number of layers.
    layers: usize,
    /// Whether the file has more layers than the model. Such a model has no final norm and no language-model head.
    is_part: bool,
    /// Whether the model has a language-model head whose matrix is not that of the embedding.
    has_head: bool,
}

impl Layout for LlamaCpp {
    fn keys(&self, name: &str) -> Vec<Key> {
        self.key(name).into_iter().collect()
    }

    /// Whether readers skip the tensor `key`. They skip the divisors of frequencies, which are in the configuration.
    /// They skip the language-model head if the model has none of its own. If the file has more layers than the model,
    /// they also skip the final norm and the further layers.
    fn ignores(&self, key: &str) -> bool {
        let layer = key.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        key == DIVISORS_KEY
            || (key == HEAD_KEY && !self.has_head)
            || (self.is_part && (key == NORM_KEY || layer.is_some_and(|layer| layer >= self.layers)))
    }
}

impl LlamaCpp {
    /// The key and form in the file of the parameter whose name in transformers is `name`. `None` if llama.cpp has no
    /// such parameter.
    fn key(&self, name: &str) -> Option<Key> {
        let outside =
            |(ours, theirs): &(&str, &str)| Some(format!("{theirs}.{}", name.strip_prefix(ours)?.strip_prefix('.')?));
        if let Some(theirs) = OUTSIDE.iter().find_map(outside) {
            return Some(Key::plain(theirs));
        }
        let (index, inside) = name.strip_prefix(keys::LAYERS)?.strip_prefix('.')?.split_once('.')?;
        let (module, parameter) = inside.rsplit_once('.')?;
        let (_, theirs) = INSIDE.iter().find(|(ours, _)| *ours == module)?;
        let form = match (self.heads, *theirs) {
            (Some([heads, _]), "attn_q") | (Some([_, heads]), "attn_k") => Form::Interleaved { heads },
            _ => Form::Plain,
        };
        Some(Key { key: format!("blk.{index}.{theirs}.{parameter}"), form })
    }
}

/// The configuration of the decoder in a GGUF file.
///
/// # Errors
/// [`Error::Config`] if the file's architecture is not one of [`ARCHITECTURES`], if a fact or the embedding is missing,
/// or if a fact has a value that is not supported; as [`GgufFile::read_as`] for the divisors of the frequencies.
pub(super) fn config(file: &GgufFile) -> Result<CausalLMConfig> {
    let facts = file.facts();
    let wrong = |text: String| Error::Config(format!("{}: {text}", file.path().display()));
    let known = ARCHITECTURES.map(|(theirs, ..)| theirs).join(", ");
    let Some(name) = facts.get("general.architecture").and_then(Value::as_str) else {
        return Err(wrong(format!("general.architecture is missing or not a string; expected one of {known}")));
    };
    let Some((_, kind, class)) = ARCHITECTURES.iter().find(|(theirs, ..)| *theirs == name) else {
        return Err(wrong(format!(
            "general.architecture is \"{name}\", which is not supported; expected one of {known}"
        )));
    };
    let fact = |key: &str| facts.get(&format!("{name}.{key}")).cloned();
    let needed =
        |key: &str| fact(key).ok_or_else(|| wrong(format!("{name}.{key} is missing; give the file of a whole model")));
    if fact("expert_count").is_some_and(|count| count != json!(0)) {
        return Err(wrong("the model is a mixture of experts, which is not supported".to_owned()));
    }
    // As in llama.cpp, a missing `attention.head_count_kv` equals the number of heads, and a missing `rope.freq_base`
    // is 10,000.
    let heads = needed("attention.head_count")?;
    let vocab_size = file.shape(EMBEDDING_KEY).and_then(|dims| dims.first().copied());
    let vocab_size = vocab_size.ok_or_else(|| wrong(format!("the tensor \"{EMBEDDING_KEY}\" is missing")))?;
    let mut json = Map::from_iter(
        [
            ("architectures", json!([class])),
            ("model_type", json!(kind)),
            ("vocab_size", json!(vocab_size)),
            ("hidden_size", needed("embedding_length")?),
            ("intermediate_size", needed("feed_forward_length")?),
            ("num_hidden_layers", needed("block_count")?),
            ("num_key_value_heads", fact("attention.head_count_kv").unwrap_or_else(|| heads.clone())),
            ("num_attention_heads", heads),
            ("rms_norm_eps", needed("attention.layer_norm_rms_epsilon")?),
            ("max_position_embeddings", needed("context_length")?),
            ("rope_theta", fact("rope.freq_base").unwrap_or_else(|| json!(10_000.0))),
            ("tie_word_embeddings", json!(file.shape(HEAD_KEY).is_none())),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            json.insert(key.to_owned(), value);
        }
    };
    put("head_dim", fact("attention.key_length").or_else(|| fact("rope.dimension_count")));
    put("bos_token_id", facts.get("tokenizer.ggml.bos_token_id").cloned());
    put("eos_token_id", facts.get("tokenizer.ggml.eos_token_id").cloned());
    let has_bias = |name: &str| file.shape(&format!("blk.0.{name}.bias")).is_some();
    // Qwen2's configuration has no field for biases: queries, keys and values always have them.
    if *kind != "qwen2" {
        put("attention_bias", has_bias("attn_q").then_some(Value::Bool(true)));
    }
    if *kind == "llama" {
        put("mlp_bias", has_bias("ffn_up").then_some(Value::Bool(true)));
    }
    put("rope_scaling", scaling(file, fact)?);
    CausalLMConfig::from_json(&json).map_err(|error| match error {
        Error::Config(text) => wrong(text),
        other => other,
    })
}

/// The field `rope_scaling` of the configuration. `None` if the file scales neither positions nor frequencies.
fn scaling(file: &GgufFile, fact: impl Fn(&str) -> Option<Value>) -> Result<Option<Value>> {
    if file.shape(DIVISORS_KEY).is_some() {
        // Only `LongRoPE` has a divisor for each frequency. The file's divisors hold for texts of all lengths, so they
        // are `LongRoPE`'s divisors for short and for long texts, and the length at which it switches between the two
        // (`original_max_position_embeddings`) does not matter.
        let divisors = file.read_as(DIVISORS_KEY, Some(DType::F32), &Device::Cpu)?.to_vec::<f32>()?;
        let longest = fact("context_length");
        return Ok(Some(json!({
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        })));
    }
    let kind = fact("rope.scaling.type");
    let Some(kind) = kind.as_ref().and_then(Value::as_str).filter(|kind| *kind != "none") else { return Ok(None) };
    let mut rope_scaling = Map::from_iter([("rope_type".to_owned(), json!(kind))]);
    let fields = [
        ("rope.scaling.factor", "factor"),
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ];
    let given = fields.into_iter().filter_map(|(theirs, ours)| Some((ours.to_owned(), fact(theirs)?)));
    // transformers' configuration of linear scaling has only the field `factor`.
    rope_scaling.extend(given.filter(|(ours, _)| kind != "linear" || ours == "factor"));
    Ok(Some(rope_scaling.into()))
}
