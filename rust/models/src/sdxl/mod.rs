//! SDXL's UNet (Podell et al. 2023, arXiv:2307.01952).

mod blocks;
mod config;
pub mod keys;
mod model;

pub use config::UNetConfig;
pub use model::{SDXLUNet, UNetConditions};

use crate::registry::ModelKind;

/// SDXL's UNet among the kinds of models.
pub static KIND: ModelKind = ModelKind::of::<SDXLUNet>(
    "SDXLUNet",
    ("a UNet", "down_blocks."),
    &[SDXLUNet::CLASS_NAME],
    "diffusion_pytorch_model.safetensors",
);
