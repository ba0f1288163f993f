//! Decoders (causal language models) with variants of Llama's architecture: Llama (Touvron et al. 2023,
//! arXiv:2302.13971), Mistral (Jiang et al. 2023, arXiv:2310.06825), Qwen2 (Yang et al. 2024, arXiv:2407.10671), Qwen3
//! (Yang et al. 2025, arXiv:2505.09388), and Qwen2.5-VL's language model (Bai et al. 2025, arXiv:2502.13923). Follows
//! <https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/qwen3/modeling_qwen3.py> and
//! transformers' `modeling_*.py` files of the other families.
//!
//! The tokens of all texts of a batch are concatenated to one sequence, in which each text is a segment (packing). So
//! the model computes nothing for padding tokens, except in [`CausalLM::padded_states`].

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

/// The registry entry of language models. Messages about a wrong file name a language model if keys begin with
/// `model.layers.`.
pub static KIND: ModelKind =
    ModelKind::of::<CausalLM>(OP, ("a language model", "model.layers."), &config::CLASS_NAMES, "model.safetensors");
