//! The autoencoder that Qwen-Image has in common with Wan 2.1 (arXiv:2503.20314), for single images. The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/autoencoders/autoencoder_kl_qwenimage.py>.
//!
//! The published model convolves in space and time, and a frame sees only itself and earlier frames. An image is the
//! first frame: only the last time slice of each kernel multiplies the image, and the earlier slices multiply zeros of
//! the padding. Therefore two-dimensional convolutions with the last slices compute the same result.

mod blocks;
mod coders;
mod config;
pub mod keys;
mod model;

pub use config::QwenVaeConfig;
pub use model::AutoencoderKLQwenImage;

use crate::registry::ModelKind;

/// The registry entry of the autoencoder.
pub static KIND: ModelKind = ModelKind::of::<AutoencoderKLQwenImage>(
    "AutoencoderKLQwenImage",
    // The noun for messages, and the name of a parameter by which messages recognise the model's files.
    ("Qwen-Image's autoencoder", "decoder.up_blocks.0.resnets.0.norm1.gamma"),
    &[AutoencoderKLQwenImage::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
