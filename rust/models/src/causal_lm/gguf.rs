//! Decoders in GGUF files: llama.cpp's names, and configurations made from the facts (metadata) of files.
//!
//! Follows `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of
//! <https://github.com/ggml-org/llama.cpp/tree/0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c>.

use serde_json::{Map, Value, json};
use trainable_candle_core::{DType, Device, Error, Result};
use trainable_candle_io::GgufFile;

use super::config::Family;
use super::{CausalLMConfig, keys};
use crate::pretrained::{Configuration, Form, Key, Layout};

/// Architectures of llama.cpp: their names, and transformers' `model_type` and class. Files of Mistral have the name of
/// Llama's architecture, because both compute the same.
const ARCHITECTURES: [(&str, &str, &str); 3] = [
    ("llama", "llama", "LlamaForCausalLM"),
    ("qwen2", "qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "qwen3", "Qwen3ForCausalLM"),
];

/// Names outside of the layers: first transformers', then llama.cpp's.
const OUTSIDE: [(&str, &str); 3] =
    [(keys::EMBEDDING, "token_embd"), (keys::NORM, "output_norm"), (keys::HEAD, "output")];

/// The embedding and the head in llama.cpp's names.
const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// Names inside a layer: first transformers', then llama.cpp's.
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

/// The tensor with the divisors of the rotary frequencies. The divisors become part of the configuration.
const FACTORS: &str = "rope_freqs.weight";

/// The names in a GGUF file.
pub(super) fn layout(config: &CausalLMConfig) -> Box<dyn Layout> {
    let heads = match config.family {
        // Rotary embedding rotates pairs of features. For these models llama.cpp pairs neighbours, but this library
        // pairs features that are half a head apart, so the rows of queries and keys are in another order.
        Family::Llama | Family::Mistral => Some([config.num_attention_heads, config.num_key_value_heads]),
        Family::Qwen2 | Family::Qwen25Vl | Family::Qwen3 => None,
    };
    let layers = config.num_hidden_layers;
    Box::new(LlamaCpp {
        heads,
        layers,
        is_part: config.is_part(),
        has_head: !config.tie_word_embeddings && !config.is_part(),
    })
}

struct LlamaCpp {
    /// Heads of queries and keys, if their rows are interleaved.
    heads: Option<[usize; 2]>,
    layers: usize,
    is_part: bool,
    has_head: bool,
}

impl Layout for LlamaCpp {
    fn places(&self, name: &str) -> Vec<Key> {
        self.place(name).into_iter().collect()
    }

    /// Readers skip the divisors of frequencies, which are in the configuration; the head, if it is tied to the
    /// embedding or not built; and the final norm and layers that are not built.
    fn ignores(&self, key: &str) -> bool {
        let layer = key.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        key == FACTORS
            || (key == HEAD && !self.has_head)
            || (self.is_part && (key == "output_norm.weight" || layer.is_some_and(|layer| layer >= self.layers)))
    }
}

impl LlamaCpp {
    fn place(&self, name: &str) -> Option<Key> {
        let outside =
            |(ours, theirs): &(&str, &str)| Some(format!("{theirs}.{}", name.strip_prefix(ours)?.strip_prefix('.')?));
        if let Some(theirs) = OUTSIDE.iter().find_map(outside) {
            return Some(Key::plain(theirs));
        }
        let (index, inside) = name.strip_prefix(keys::LAYERS)?.strip_prefix('.')?.split_once('.')?;
        let (layer, parameter) = inside.rsplit_once('.')?;
        let (_, theirs) = INSIDE.iter().find(|(ours, _)| *ours == layer)?;
        let form = match (self.heads, *theirs) {
            (Some([heads, _]), "attn_q") | (Some([_, heads]), "attn_k") => Form::Interleaved { heads },
            _ => Form::Plain,
        };
        Some(Key { key: format!("blk.{index}.{theirs}.{parameter}"), form })
    }
}

/// The configuration of the decoder in a file.
///
/// # Errors
/// [`Error::Config`] for another architecture, or if a fact is missing or not supported.
pub(super) fn config(file: &GgufFile) -> Result<CausalLMConfig> {
    let facts = file.facts();
    let wrong = |text: String| Error::Config(format!("{}: {text}", file.path().display()));
    let name = facts.get("general.architecture").and_then(Value::as_str).unwrap_or("missing");
    let Some((_, kind, class)) = ARCHITECTURES.iter().find(|(theirs, ..)| *theirs == name) else {
        let known = ARCHITECTURES.map(|(theirs, ..)| theirs).join(", ");
        return Err(wrong(format!("general.architecture is {name}, which is not supported; expected one of {known}")));
    };
    let fact = |key: &str| facts.get(&format!("{name}.{key}")).cloned();
    let needed =
        |key: &str| fact(key).ok_or_else(|| wrong(format!("{name}.{key} is missing; is the file a whole model?")));
    if fact("expert_count").is_some_and(|count| count != json!(0)) {
        return Err(wrong("the model is a mixture of experts, which is not supported".to_owned()));
    }
    let vocabulary = file.shape(EMBEDDING).and_then(|dims| dims.first().copied());
    let heads = needed("attention.head_count")?;
    let mut json = Map::from_iter(
        [
            ("architectures", json!([class])),
            ("model_type", json!(kind)),
            ("vocab_size", json!(vocabulary.ok_or_else(|| wrong(format!("{EMBEDDING} is missing")))?)),
            ("hidden_size", needed("embedding_length")?),
            ("intermediate_size", needed("feed_forward_length")?),
            ("num_hidden_layers", needed("block_count")?),
            ("num_key_value_heads", fact("attention.head_count_kv").unwrap_or_else(|| heads.clone())),
            ("num_attention_heads", heads),
            ("rms_norm_eps", needed("attention.layer_norm_rms_epsilon")?),
            ("max_position_embeddings", needed("context_length")?),
            ("rope_theta", fact("rope.freq_base").unwrap_or_else(|| json!(10_000.0))),
            ("tie_word_embeddings", json!(file.shape(HEAD).is_none())),
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
    let has = |name: &str| file.shape(&format!("blk.0.{name}.bias")).is_some();
    match *kind {
        "qwen2" => {}
        _ => put("attention_bias", has("attn_q").then_some(Value::Bool(true))),
    }
    if *kind == "llama" {
        put("mlp_bias", has("ffn_up").then_some(Value::Bool(true)));
    }
    put("rope_scaling", scaling(file, fact)?);
    CausalLMConfig::from_json(&json).map_err(|error| match error {
        Error::Config(text) => wrong(text),
        other => other,
    })
}

/// The field `rope_scaling` of the configuration, if positions are scaled.
fn scaling(file: &GgufFile, fact: impl Fn(&str) -> Option<Value>) -> Result<Option<Value>> {
    if file.shape(FACTORS).is_some() {
        let factors = file.read_as(FACTORS, Some(DType::F32), &Device::Cpu)?.to_vec::<f32>()?;
        let longest = fact("context_length");
        return Ok(Some(json!({
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        })));
    }
    let kind = fact("rope.scaling.type");
    let Some(kind) = kind.as_ref().and_then(Value::as_str).filter(|kind| *kind != "none") else { return Ok(None) };
    let mut found = Map::from_iter([("rope_type".to_owned(), json!(kind))]);
    let fields = [
        ("rope.scaling.factor", "factor"),
        ("rope.scaling.original_context_length", "original_max_position_embeddings"),
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ];
    let given = fields.into_iter().filter_map(|(theirs, ours)| Some((ours.to_owned(), fact(theirs)?)));
    // For linear scaling, the factor is the only field in transformers' configuration.
    found.extend(given.filter(|(ours, _)| kind != "linear" || ours == "factor"));
    Ok(Some(found.into()))
}
