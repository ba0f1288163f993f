//! Fine-tune large models with LoRA and DoRA, without PyTorch.
//!
//! This crate is the whole library under one name: tensors and the autograd tape ([`core`]), layers, adapters and
//! optimizers ([`nn`]), files ([`io`]), models ([`models`]), objectives and samplers ([`train`]). [`prelude`] has what
//! most programs need. The feature `cuda` adds NVIDIA GPUs: a build with this feature needs CUDA's compiler, and a
//! program needs the libraries that [`core::device::cuda`] finds at run time.
//!
//! The folder `examples` has two complete programs: `train_network` trains a small network and then a LoRA on it, and
//! `train_sdxl_lora` trains a LoRA of SDXL's UNet from cached latents.
//!
//! # Gradients
//!
//! ```
//! use trainable_candle::{Device, Var};
//!
//! let x = Var::new(2f32, &Device::Cpu)?;
//! let y = (&x * &x)?;
//! let grads = y.backward()?;
//! assert_eq!(grads.get(&x).unwrap().item()?, 4.0); // y = x², dy/dx = 4 at 2
//! assert_eq!(x.grad().unwrap().item()?, 4.0); // the gradient is also stored in the variable
//! # Ok::<(), trainable_candle::Error>(())
//! ```
//!
//! # Training a network
//!
//! ```
//! use trainable_candle::{Adam, DType, Device, Linear, Optimizer, Tensor, Var, mse_loss};
//!
//! let device = Device::Cpu;
//! let fc1 = Linear::<Var>::new(784, 128, &device)?;
//! let fc2 = Linear::<Var>::new(128, 10, &device)?;
//! let mut opt = Adam::new([fc1.vars(), fc2.vars()].concat(), 1e-3)?; // learning rate
//! let input = Tensor::randn(0.0, 1.0, (32, 784), DType::F32, &device)?;
//! let target = Tensor::randn(0.0, 1.0, (32, 10), DType::F32, &device)?;
//! let mut losses = Vec::new();
//! for _ in 0..10 {
//!     let output = fc2.forward(&fc1.forward(&input)?.relu()?)?;
//!     let loss = mse_loss(&output, &target)?;
//!     let grads = loss.backward()?;
//!     opt.step(&grads)?; // applies the gradients and clears them
//!     losses.push(loss.item()?);
//! }
//! assert!(losses[9] < losses[0]);
//! # Ok::<(), trainable_candle::Error>(())
//! ```
//!
//! # LoRA on a frozen layer, with 8-bit Adam
//!
//! ```
//! use trainable_candle::{Adam8bit, DType, Device, LoRALinear, Optimizer, Tensor, mse_loss};
//!
//! let device = Device::Cpu;
//! let base_weight = Tensor::randn(0.0, 0.02, (64, 128), DType::F32, &device)?; // (out, in), frozen
//! let lora = LoRALinear::new(base_weight.clone(), 16, 16.0, &device)?; // rank 16, alpha 16
//! let mut opt = Adam8bit::new(lora.get_vars(), 1e-2, 0.01)?; // learning rate, weight decay
//! let x = Tensor::randn(0.0, 1.0, (32, 128), DType::F32, &device)?;
//! let target = Tensor::randn(0.0, 1.0, (32, 64), DType::F32, &device)?;
//! let before = mse_loss(&lora.forward(&x)?, &target)?.item()?;
//! for _ in 0..20 {
//!     let grads = mse_loss(&lora.forward(&x)?, &target)?.backward()?;
//!     opt.step(&grads)?;
//! }
//! assert!(mse_loss(&lora.forward(&x)?, &target)?.item()? < before);
//! assert_eq!(lora.merge()?.dims(), [64, 128]); // W + scale * up * down
//! # Ok::<(), trainable_candle::Error>(())
//! ```
//!
//! # Frozen layers, tensors of candle, and LoRA's backward pass alone
//!
//! ```
//! use trainable_candle::{DType, Device, LoRABackwardOps, Linear, MakeVar, Raw, Tensor};
//!
//! let device = Device::Cpu;
//! let weight_tensor = Tensor::randn(0.0, 0.02, (8, 4), DType::F32, &device)?;
//! let frozen = Linear::from_weight(weight_tensor, None); // a Linear<Tensor>
//! let x = Tensor::randn(0.0, 1.0, (3, 4), DType::F32, &device)?;
//! assert!(!frozen.forward(&x)?.requires_grad());
//!
//! let candle_tensor = Raw::arange(0f32, 6f32, &device)?.reshape((2, 3))?.t()?; // a candle_core::Tensor, strided
//! let v = candle_tensor.make_var()?;
//! assert!(v.requires_grad());
//!
//! let (lora_down, lora_up) = (Tensor::randn(0.0, 1.0, (2, 4), DType::F32, &device)?, Tensor::randn(0.0, 1.0, (8, 2), DType::F32, &device)?);
//! let grad_output = Tensor::ones((3, 8), DType::F32, &device)?;
//! let scale = 0.5; // alpha / rank
//! let (grad_down, grad_up) = LoRABackwardOps::backward(&grad_output, &x, &lora_down, &lora_up, scale)?;
//! assert_eq!((grad_down.dims(), grad_up.dims()), (lora_down.dims(), lora_up.dims()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Checkpointing
//!
//! The backward pass calls the checkpointed function again, so the function must own what it uses (`move`).
//!
//! ```
//! use std::sync::Arc;
//! use trainable_candle::{Device, DType, Linear, Tensor, Var, gradient_checkpoint};
//!
//! let block = Arc::new(Linear::<Var>::new(16, 16, &Device::Cpu)?);
//! let x = Tensor::randn(0.0, 1.0, (4, 16), DType::F32, &Device::Cpu)?;
//! let inner = block.clone();
//! let y = gradient_checkpoint::checkpoint(move |xs| inner.forward(&xs[0])?.tanh(), &[&x])?;
//! let grads = y.sum_all()?.backward()?;
//! assert!(grads.get(&block.weight).is_some());
//! # Ok::<(), trainable_candle::Error>(())
//! ```

pub use trainable_candle_core as core;
pub use trainable_candle_core::checkpoint as gradient_checkpoint;
pub use trainable_candle_core::ops::loss::{Reduction, cross_entropy, huber_loss, l1_loss};
pub use trainable_candle_core::{
    DType, Device, Error, GradStore, MakeVar, Raw, Result, Shape, Tensor, Var, grad, no_grad,
};
pub use trainable_candle_io as io;
pub use trainable_candle_models as models;
pub use trainable_candle_nn as nn;
pub use trainable_candle_nn::Linear;
pub use trainable_candle_nn::adapter::{DoRALinear, LoRABackwardOps, LoRALinear, LoraConfig};
pub use trainable_candle_nn::optim::kinds::*;
pub use trainable_candle_nn::optim::{Optimizer, StatePlace};
pub use trainable_candle_train as train;

/// The names that most programs need.
///
/// ```
/// use trainable_candle::prelude::*;
///
/// let layer = Linear::<Var>::new(4, 2, &Device::Cpu)?;
/// let mut optimizer = AdamW::new(layer.vars(), 1e-3, 0.01)?; // learning rate, weight decay
/// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
/// let loss = mse_loss(&layer.forward(&x)?, &Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?)?;
/// optimizer.step(&loss.backward()?)?;
/// # Ok::<(), Error>(())
/// ```
pub mod prelude {
    pub use crate::nn::adapter::AdapterSet;
    pub use crate::nn::{Module, Parameter, Visitor};
    pub use crate::{
        Adam8bit, AdamW, DType, Device, Error, Linear, LoRALinear, LoraConfig, MakeVar, Optimizer, Result, Shape,
        Tensor, Var, cross_entropy, mse_loss, no_grad,
    };
}

/// The mean of the squared differences of `input` and `target`, as a tensor of one element. `input` and `target` must
/// have the same shape.
///
/// # Errors
/// [`Error::Shape`] or [`Error::DType`] if the shapes or the dtypes do not fit together.
pub fn mse_loss(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    core::ops::loss::mse_loss(input, target, Reduction::Mean)
}
