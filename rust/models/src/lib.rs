//! Models of trainable-candle.
//!
//! A model is a folder with its configuration, its blocks and its forward pass, and one line in the
//! [registry]. Models know nothing of adapters and optimizers: they list their parts
//! ([`trainable_candle_nn::Module`]) and compute.

pub mod digits;
pub mod layers;
mod pretrained;
pub mod registry;

pub use digits::DigitsTransformer;
pub use pretrained::{Pretrained, save_pretrained};
pub use registry::{Model, load};
