//! Layers, adapters and optimizers of trainable-candle.

pub mod adapter;
pub mod init;
mod linear;
mod module;
mod norm;
pub mod optim;
mod weights;

pub use linear::Linear;
pub use module::{Layer, Module, Part, Visitor};
pub use norm::{LayerNorm, RmsNorm};
pub use weights::{Init, Source, Weights};
