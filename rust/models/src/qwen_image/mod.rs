//! The transformer of Qwen-Image (Qwen 2025, arXiv:2508.02324). The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_qwenimage.py>.

mod config;
pub mod keys;
mod model;

pub use config::QwenImageConfig;
pub use model::{QwenImageConditions, QwenImageTransformer};

use crate::registry::ModelKind;

/// The registry entry of Qwen-Image's transformer.
pub static KIND: ModelKind = ModelKind::of::<QwenImageTransformer>(
    "QwenImageTransformer",
    ("a Qwen-Image transformer", "transformer_blocks.0.img_mod."),
    &[QwenImageTransformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
