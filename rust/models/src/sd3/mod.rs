//! The transformer of Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206). The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_sd3.py#L80>.

mod config;
pub mod keys;
mod model;
mod positions;

pub use config::SD3Config;
pub use model::{SD3Conditions, SD3Transformer};

use crate::registry::ModelKind;

/// The registry entry of SD3's transformer.
pub static KIND: ModelKind = ModelKind::of::<SD3Transformer>(
    "SD3Transformer",
    // For messages about a wrong file: the noun, and a prefix of keys by which the model's files are recognized.
    ("an SD3 transformer", "transformer_blocks.0.norm1_context."),
    &[SD3Transformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
