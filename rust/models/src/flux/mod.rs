//! Flux.1's transformer (Black Forest Labs 2024). Follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_flux.py>.

mod config;
pub mod keys;
mod model;

pub use config::FluxConfig;
pub use model::{FluxConditions, FluxTransformer};

use crate::registry::ModelKind;

/// The registry entry of Flux.1's transformer.
pub static KIND: ModelKind = ModelKind::of::<FluxTransformer>(
    "FluxTransformer",
    ("a Flux transformer", "single_transformer_blocks.0.norm.linear."),
    &[FluxTransformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
