//! Decoders of the Llama kind: Llama (Touvron et al. 2023, arXiv:2302.13971), Mistral (Jiang et al. 2023, arXiv:2310.06825), Qwen2
//! (Yang et al. 2024, arXiv:2407.10671) and Qwen3 (Yang et al. 2025, arXiv:2505.09388), which are variants of one
//! architecture.
//! Follows
//! <https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/qwen3/modeling_qwen3.py> and its siblings.
//!
//! The tokens of all texts are in one row, and each text is a segment of it. There is no padding inside the model,
//! except in [`CausalLM::padded_states`].

mod cache;
mod config;
mod extend;
mod generate;
mod gguf;
mod keys;
mod layers;
mod model;
mod packing;
mod rope;
mod sampling;

pub use cache::KvCache;
pub use config::{CausalLMConfig, Family};
pub use generate::{GenerateOptions, Generation};
pub use model::CausalLM;
pub use packing::PackedTexts;
pub use rope::{Rope, Scaling};
pub use sampling::Sampling;

use crate::registry::ModelKind;

/// The model's name in errors.
const OP: &str = "CausalLM";

/// The registry entry of language models.
pub static KIND: ModelKind =
    ModelKind::of::<CausalLM>(OP, ("a language model", "model.layers."), &config::CLASS_NAMES, "model.safetensors");
