//! Tensors, trainable variables and the autograd tape of trainable-candle.
#![allow(missing_docs)]
pub mod cpu;
mod error;
pub mod raw;
pub use error::{Error, Result};
pub use raw::Raw;
