//! Layers, adapters and optimizers of trainable-candle.

pub mod adapter;
pub mod init;
mod linear;
mod module;
mod norm;
pub mod optim;
mod source;
mod weights;

pub use linear::Linear;
pub use module::{Layer, Module, Part, Visitor};
pub use norm::{GroupNorm, LayerNorm, RmsNorm};
pub use source::{Source, Stored};
pub use weights::{Init, Weights};
