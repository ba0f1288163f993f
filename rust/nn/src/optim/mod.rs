//! Optimizers, learning-rate schedules, gradient clipping, loss scaling and averages of parameters.
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
//! Every optimizer is a [`Stepper`] with a [`Rule`], or holds such a [`Stepper`] if its steps need sums over all
//! variables. To add an optimizer, write a file with a rule and its hyper-parameters, and add a line to the registry,
//! the macro call that makes [`KINDS`].
//!
//! All optimizers take f32, f16 and bf16 variables. They hold f32 master values for f16 variables, and for bf16
//! variables that are not rounded stochastically. On the CPU, optimizers with states in full precision also take f64
//! variables. Variables that share one flat buffer are updated in one pass over the buffer.
//!
//! The states, hyper-parameters and step counters of CUDA variables are on the device;
//! [`place_states`](Optimizer::place_states) puts the states into memory of the host instead. A step is usually two
//! launches for all variables, without synchronization. It also writes the f16 or bf16 copies of f32 variables that the
//! forward pass reads. An optimizer supports CUDA devices if its rule has [`KERNELS`](Rule::KERNELS). State dicts do
//! not depend on the device, so a run can continue on another kind of device.

mod averages;
mod blocks;
mod clip;
#[cfg(target_arch = "x86_64")]
mod codes;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod ema;
mod guard;
mod kind;
mod lanes;
pub mod quant;
mod rounding;
pub mod rule;
mod scaler;
mod schedule;
#[cfg(any(feature = "cuda", test))]
mod slots;
mod state;
mod stepper;
mod update;

pub use clip::{NormType, clip_grad_norm_, grad_norm};
pub use ema::{EMA, EMAConfig};
pub use guard::Guard;
pub use kind::{Field, HyperParameters, NamedGroup, OptimizerKind, Registered, Value};
pub use rule::Rule;
pub use scaler::{GradScaler, GradScalerConfig};
pub use schedule::{Decay, Schedule};
pub use state::{StateDict, StatePlace};
pub use stepper::{Optimizer, ParamGroup, Stepper};

/// The registry: declares the module of each file, exports its optimizers and collects their [`OptimizerKind`]s.
macro_rules! registry {
    ($($file:ident: $($name:ident),+;)*) => {
        $(mod $file;)*

        $(pub use $file::*;)*

        /// The optimizers of the registry.
        pub mod kinds {
            $(pub use super::{$($name),+};)*
        }

        /// All optimizers. Among similar optimizers, those that need less memory come first.
        pub static KINDS: &[OptimizerKind] = &[$($(OptimizerKind::of::<$name>()),+),*];
    };
}

// One line for each file. All other lists of optimizers follow from these lines.
registry! {
    adam8bit: AdamW8bit, Adam8bit;
    adam: AdamW, Adam;
    lion8bit: Lion8bit;
    lion: Lion;
    adafactor: Adafactor;
    came: CAME;
    prodigy: Prodigy;
    schedule_free: AdamWScheduleFree;
    muon: Muon;
    sgd: SGD;
}
