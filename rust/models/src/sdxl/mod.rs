//! SDXL's UNet (Podell et al. 2023, arXiv:2307.01952).

mod blocks;
mod config;
pub mod keys;
pub mod lora_keys;
mod model;

pub use config::UNetConfig;
pub use model::{SDXLUNet, UNetConditions};
