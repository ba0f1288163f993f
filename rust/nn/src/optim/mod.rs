//! Optimizers, learning-rate schedules, gradient clipping, loss scaling, averages.
//!
//! ```
//! use trainable_candle_core::{Device, Tensor, Var};
//! use trainable_candle_nn::optim::{Adam, Optimizer};
//!
//! let x = Var::new(2f32, &Device::Cpu)?;
//! let mut opt = Adam::new(vec![x.clone()], 0.1)?;
//! for _ in 0..200 {
//!     let loss = (&*x * &*x)?;
//!     let grads = loss.backward()?;
//!     opt.step(&grads)?;
//! }
//! assert!(x.item()?.abs() < 0.05);
//! # Ok::<(), trainable_candle_core::Error>(())
//! ```
//!
//! Every optimizer is a [`Stepper`] over a [`Rule`] (or holds one, where a step needs something of all variables together); a
//! new one is a file with a rule. All take f32, f16 and bf16 variables
//! (the two short dtypes with f32 master values that the optimizer holds), those with states in full precision also
//! f64. Variables that share one flat buffer are updated in one pass over it.
//!
//! For CUDA variables, states, hyper-parameters and step counters are on the device. A step is two launches for all variables, without
//! synchronization, which also write the copies that f16 or bf16 computation reads. State dicts do not depend on the device, so a run
//! can continue on the other kind. Adafactor, Prodigy and f64 variables have no CUDA form.

mod adafactor;
mod adam;
mod adam8bit;
mod clip;
#[cfg(target_arch = "x86_64")]
mod codes;
#[cfg(feature = "cuda")]
mod device;
mod ema;
mod lion;
mod lion8bit;
mod prodigy;
pub mod quant;
pub mod rule;
mod scaler;
mod schedule;
mod sgd;
#[cfg(any(feature = "cuda", test))]
mod slots;
mod state;
mod stepper;
mod update;

pub use adafactor::{Adafactor, AdafactorConfig, AdafactorRule};
pub use adam::{Adam, AdamConfig, AdamRule, AdamW, AdamWRule};
pub use adam8bit::{Adam8bit, Adam8bitConfig, Adam8bitRule, AdamW8bit, AdamW8bitRule};
pub use clip::{NormType, clip_grad_norm_, grad_norm};
pub use ema::{EMA, EMAConfig};
pub use lion::{Lion, LionConfig, LionRule};
pub use lion8bit::{Lion8bit, Lion8bitConfig, Lion8bitRule};
pub use prodigy::{Prodigy, ProdigyConfig};
pub use rule::Rule;
pub use scaler::{GradScaler, GradScalerConfig};
pub use schedule::{Decay, Schedule};
pub use sgd::{SGD, SGDConfig, SGDRule};
pub use stepper::{Guard, Optimizer, ParamGroup, StateDict, Stepper};
