//! FLUX.2's transformer (Black Forest Labs 2025). Follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/transformers/transformer_flux2.py>.

mod config;
pub mod keys;
mod model;
mod single;

pub use config::Flux2Config;
pub use model::{Flux2Conditions, Flux2Transformer};

use crate::registry::ModelKind;

/// The registry entry of FLUX.2's transformer: its class in Python; its noun for messages about a wrong file, with a
/// prefix of keys by which its files are recognised; the class names in `config.json`; the name of the weight file.
pub static KIND: ModelKind = ModelKind::of::<Flux2Transformer>(
    "Flux2Transformer",
    ("a FLUX.2 transformer", "single_transformer_blocks.0.attn.to_qkv_mlp_proj."),
    &[Flux2Transformer::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
