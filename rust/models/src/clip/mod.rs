//! CLIP's text encoders (Radford et al. 2021, arXiv:2103.00020), OpenAI's and OpenCLIP's.

mod config;
pub mod keys;
mod layers;
pub mod lora_keys;
mod model;

pub use config::{Activation, CLIPTextConfig};
pub use model::{CLIPTextModel, TextFeatures};
