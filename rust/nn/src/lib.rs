//! Layers, adapters and optimizers of trainable-candle.

pub mod adapter;
mod base;
mod blocks;
pub mod conv;
mod group;
pub mod init;
mod linear;
mod module;
mod norm;
pub mod optim;
mod quantization;
mod slot;
mod source;
mod streaming;
mod weights;

pub use base::{Base, Operation};
pub use blocks::{BlockState, Blocks, Checkpointing};
pub use conv::Conv2d;
pub use group::{LinearGroup, Projected};
pub use linear::{Linear, Parameter};
pub use module::{Layer, Module, Part, Visitor};
pub use norm::{GroupNorm, LayerNorm, RmsNorm};
pub use quantization::{Quantizable, Quantization};
pub use source::{Source, Stored};
pub use streaming::{StreamOptions, StreamedBytes, Streaming};
pub use weights::{Init, Weights};
