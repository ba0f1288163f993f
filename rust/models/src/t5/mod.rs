//! The encoder of T5 (Raffel et al. 2019, arXiv:1910.10683). The encoder of version 1.1 is a text encoder of Stable
//! Diffusion 3, Flux and Chroma. The code follows
//! <https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/t5/modeling_t5.py>.

mod config;
pub mod keys;
mod layers;
mod model;
mod relative;

pub use config::{FeedForward, T5Config};
pub use model::T5Encoder;
pub use relative::bucket;

use crate::registry::ModelKind;

/// The class in the `config.json` of a folder whose files hold the decoder too. This library does not read the decoder.
const WHOLE_CLASS_NAME: &str = "T5ForConditionalGeneration";

/// The registry entry of T5's encoder.
pub static KIND: ModelKind = ModelKind::of::<T5Encoder>(
    "T5Encoder",
    // For messages about a wrong file: the noun, and a prefix of the keys.
    ("a T5 text encoder", "encoder.block."),
    &[T5Encoder::CLASS_NAME, WHOLE_CLASS_NAME],
    "model.safetensors",
);
