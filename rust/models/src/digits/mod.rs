//! The demo's image generator: a flow-matching diffusion transformer (DiT, Peebles & Xie 2022, arXiv:2212.09748) for
//! images of handwritten digits. It is small enough to ship in the package and to fine-tune in seconds on a CPU.
//!
//! Its layers have diffusers' names, so the same targets of adapters fit this model and large models.

mod blocks;
mod config;
mod model;

pub use config::DigitsConfig;
pub use model::DigitsTransformer;

use crate::registry::ModelKind;

/// The registry entry of the digits transformer.
pub static KIND: ModelKind = ModelKind::of::<DigitsTransformer>(
    "DigitsTransformer",
    ("a digits transformer", "class_embedding."),
    &[DigitsTransformer::CLASS_NAME],
    "model.safetensors",
);
