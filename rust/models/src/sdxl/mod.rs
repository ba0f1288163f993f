//! SDXL's UNet (Podell et al. 2023, arXiv:2307.01952). The code follows
//! <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/models/unets/unet_2d_condition.py#L76>.

mod blocks;
mod config;
pub mod keys;
mod model;

pub use config::UNetConfig;
pub use model::{SDXLUNet, UNetConditions};

use crate::registry::ModelKind;

/// The registry entry of SDXL's UNet.
pub static KIND: ModelKind = ModelKind::of::<SDXLUNet>(
    "SDXLUNet",
    ("a UNet", "down_blocks."), // the noun and the prefix of keys for messages about a wrong file
    &[SDXLUNet::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
