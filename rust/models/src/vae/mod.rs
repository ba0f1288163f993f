//! The autoencoder between images and latents (Kingma & Welling 2014, arXiv:1312.6114; Rombach et al. 2022,
//! arXiv:2112.10752). The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/autoencoders/autoencoder_kl.py#L36>.

mod blocks;
mod coders;
mod coding;
mod config;
pub mod keys;
mod model;
mod tiling;

pub use coding::Coding;
pub use config::VaeConfig;
pub use model::AutoencoderKL;

use crate::registry::ModelKind;

/// The registry entry of the autoencoder.
pub static KIND: ModelKind = ModelKind::of::<AutoencoderKL>(
    "AutoencoderKL",
    // For messages about a wrong file: the noun of such a model, and a prefix of the keys in its files.
    ("an autoencoder", "decoder.up_blocks."),
    // The second class is FLUX.2's autoencoder.
    &[AutoencoderKL::CLASS_NAME, AutoencoderKL::NORMED_CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
