//! Tensors, trainable variables and the autograd tape of trainable-candle.
//!
//! A [`Tensor`] wraps a candle tensor and never changes. The values of a [`Var`], a trainable variable, can change. The
//! tape records operations on tensors that depend on a variable, and [`Tensor::backward`] computes the variables'
//! gradients from these records:
//!
//! ```
//! use trainable_candle_core::{Device, Var};
//!
//! let x = Var::new(2f32, &Device::Cpu)?;
//! let y = (&x * &x)?;
//! let grads = y.backward()?;
//! assert_eq!(grads.get(&x).unwrap().item()?, 4.0); // dy/dx = 2x
//! # Ok::<(), trainable_candle_core::Error>(())
//! ```

pub mod capture;
pub mod checkpoint;
pub mod compute;
mod copies;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
pub mod cuda;
pub mod device;
mod error;
pub mod flat;
pub mod gradcheck;
pub mod interrupt;
pub mod memory;
pub mod ops;
mod product;
pub mod quantized;
pub mod raw;
mod recycle;
pub mod rng;
pub mod streaming;
pub mod tape;
mod tensor;
mod var;

pub use candle_core::{DType, Device, DeviceLocation, Shape};
pub use error::{Error, Result};
pub use flat::FlatBuffer;
pub use quantized::{Quantized, Weight, WeightRef};
pub use raw::Raw;
pub use recycle::RecyclingAllocator;
pub use tape::{GradStore, grad, no_grad};
pub use tensor::Tensor;
pub use var::{MakeVar, Var};
