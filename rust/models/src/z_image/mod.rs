//! The transformer of Z-Image (Tongyi-MAI 2025, arXiv:2511.22699). The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_z_image.py>.

mod block;
mod config;
pub mod keys;
mod model;
mod positions;

pub use config::ZImageConfig;
pub use model::{ZImageConditions, ZImageTransformer};

use crate::registry::ModelKind;

/// The registry entry of Z-Image's transformer.
pub static KIND: ModelKind = ModelKind::of::<ZImageTransformer>(
    "ZImageTransformer",
    // For messages about a wrong file: the model's name, and a prefix of keys by which its files are recognized.
    ("a Z-Image transformer", "all_x_embedder."),
    &[ZImageTransformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
