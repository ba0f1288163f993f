//! Text encoders, and a section of GGUF files, that the entries of several pipelines can share.
//!
//! A section says how a checkpoint in one file stores a model: the possible prefixes of its keys (the empty one for a
//! file that holds the encoder alone), the names that follow (`Naming::Own`: those of the library transformers;
//! `LlamaCpp`: those of GGUF files), and a key, the probe, that every such file has. `fits` tells whether a
//! `config.json` may be the encoder's, and `published` returns the published model's.

use serde_json::{Map, Value, json};

use super::{Part, Role, Section};
use crate::causal_lm;
use crate::pretrained::{Configuration, Naming};
use crate::t5::{self, T5Config};

/// T5's encoder in the folder `subfolder`. Adapters on it are not supported.
pub(super) const fn t5_part(subfolder: &'static str) -> Part {
    Part {
        role: Role::TextEncoder,
        model: &t5::KIND,
        subfolder,
        sections: &[
            Section {
                prefixes: &["text_encoders.t5xxl.transformer.", ""],
                naming: Naming::Own,
                probe: "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            },
            Section { prefixes: &[""], naming: Naming::LlamaCpp, probe: "enc.blk.0.attn_rel_b.weight" },
        ],
        // Every configuration of a T5 encoder fits.
        fits: |_| true,
        published: || T5Config::default().to_json(),
        adapter: None,
    }
}

/// The section of a GGUF file that holds a language model.
pub(super) const LLAMA_CPP: Section =
    Section { prefixes: &[""], naming: Naming::LlamaCpp, probe: "blk.0.attn_q.weight" };

/// Qwen3 as a text encoder. Adapters on it are not supported. The sizes are those of Qwen3 4B, unless the model's files
/// show other sizes.
pub(super) const QWEN3_ENCODER: Part = Part {
    role: Role::TextEncoder,
    model: &causal_lm::KIND,
    subfolder: "text_encoder",
    sections: &[
        Section {
            prefixes: &["text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_8b.transformer.", ""],
            naming: Naming::Own,
            probe: "model.layers.0.self_attn.q_norm.weight",
        },
        LLAMA_CPP,
    ],
    fits: |config| config.get("model_type").and_then(Value::as_str) == Some("qwen3"),
    published: qwen3_4b,
    adapter: None,
};

/// Qwen2.5-VL's language model as a text encoder. Adapters on it are not supported.
pub(super) const QWEN25_VL_ENCODER: Part = Part {
    role: Role::TextEncoder,
    model: &causal_lm::KIND,
    subfolder: "text_encoder",
    sections: &[Section {
        prefixes: &["text_encoders.qwen25_7b.transformer.", ""],
        naming: Naming::Own,
        probe: "model.layers.0.self_attn.k_proj.bias",
    }],
    fits: |config| config.get("model_type").and_then(Value::as_str) == Some("qwen2_5_vl"),
    published: qwen25_vl_7b,
    adapter: None,
};

/// The configuration of Qwen2.5-VL 7B.
fn qwen25_vl_7b() -> Map<String, Value> {
    let json = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
    });
    if let Value::Object(map) = json { map } else { Map::new() }
}

/// The configuration of Qwen3 4B.
fn qwen3_4b() -> Map<String, Value> {
    let json = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": true,
    });
    if let Value::Object(map) = json { map } else { Map::new() }
}
