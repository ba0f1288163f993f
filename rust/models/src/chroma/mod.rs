//! The transformer of Chroma (lodestones 2025). It has Flux.1's transformer blocks, but a single network, the
//! approximator, computes the modulation of all blocks. Follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_chroma.py>.

mod approximator;
mod config;
pub mod keys;
mod model;

pub use config::ChromaConfig;
pub use model::{ChromaConditions, ChromaTransformer};

use crate::registry::ModelKind;

/// The registry entry of Chroma's transformer. Messages about unexpected files recognise it by its approximator's keys.
pub static KIND: ModelKind = ModelKind::of::<ChromaTransformer>(
    "ChromaTransformer",
    ("a Chroma transformer", "distilled_guidance_layer.layers.0.linear_1."),
    &[ChromaTransformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
