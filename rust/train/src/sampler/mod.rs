//! Samplers: they compute data from noise.
//!
//! A [`Sampler`] is one run of a diffusion model's sampler, with its timesteps, noise levels and state. [`sample`] runs
//! a sampler with a model given as a closure:
//!
//! ```
//! use trainable_candle_core::{DType, Device, Tensor};
//! use trainable_candle_train::objective::NoiseSchedule;
//! use trainable_candle_train::sampler::{SamplerKind, sample};
//!
//! let (steps, karras) = (20, false);
//! let mut sampler = SamplerKind::DpmSolver.start(&NoiseSchedule::sdxl()?, steps, karras)?;
//! let noise = Tensor::randn(0.0, 1.0, (1, 4, 8, 8), DType::F32, &Device::Cpu)?;
//! // The closure stands in for a model.
//! let latents = sample(&mut *sampler, &noise, |x, _timestep| x.mul_scalar(0.9))?;
//! assert_eq!(latents.dims(), [1, 4, 8, 8]);
//! # Ok::<(), trainable_candle_core::Error>(())
//! ```
//!
//! For rectified flow there are functions instead: [`euler`] runs the whole sampler.

mod dpm_solver;
mod euler;
mod flow;
mod grid;
mod guidance;

use trainable_candle_core::{DType, Error, Result, Tensor, no_grad};

pub use dpm_solver::DpmSolver;
pub use euler::Euler;
pub use flow::{euler, euler_step, flow_sigmas};
pub use guidance::{Guided, classifier_free_guidance};

use crate::objective::{NoiseSchedule, PredictionType};

/// One run from noise to data. Samples are f64 if the noise is f64, otherwise f32, whatever the dtype of the model is.
pub trait Sampler: Send {
    /// The timestep that the model receives at each step.
    fn timesteps(&self) -> &[f64];

    /// The noise-to-data ratio σ at each step, and a final 0 for the finished sample.
    fn sigmas(&self) -> &[f64];

    /// Scale standard normal noise to the run's first sample.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the sample does not fit in memory.
    fn init_noise(&self, noise: &Tensor) -> Result<Tensor>;

    /// Scale `x` to the model's input at step `i`.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no step `i`.
    fn scale_input(&self, x: &Tensor, i: usize) -> Result<Tensor>;

    /// Compute the sample at the next noise level. `x` is the sample at step `i`, and `model_output` is the model's
    /// output for the scaled `x`. Call the steps in order from 0; step 0 starts a new run.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no step `i`, or if `i` is out of order and the sampler needs the previous step's
    /// result; [`Error::Shape`] if the model's output does not have the shape of `x`.
    fn step(&mut self, model_output: &Tensor, i: usize, x: &Tensor) -> Result<Tensor>;
}

/// The kinds of sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplerKind {
    /// [`Euler`].
    Euler,
    /// [`DpmSolver`].
    DpmSolver,
}

impl std::str::FromStr for SamplerKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "euler" => Ok(Self::Euler),
            "dpmpp_2m" => Ok(Self::DpmSolver),
            other => {
                Err(Error::argument(OP, format!("unknown sampler \"{other}\"; expected \"euler\" or \"dpmpp_2m\"")))
            }
        }
    }
}

impl SamplerKind {
    /// Start a run of `steps` steps for a model trained with `schedule`. `karras` spaces the noise levels as in Karras
    /// et al. 2022 (arXiv:2206.00364, equation 5), ρ = 7.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are no steps or too many: [`Euler`] takes at most as many steps as the schedule has
    /// timesteps, [`DpmSolver`] one fewer.
    pub fn start(self, schedule: &NoiseSchedule, steps: usize, karras: bool) -> Result<Box<dyn Sampler>> {
        Ok(match self {
            Self::Euler => Box::new(Euler::new(schedule, steps, karras)?),
            Self::DpmSolver => Box::new(DpmSolver::new(schedule, steps, karras)?),
        })
    }
}

/// Run the sampler from standard normal `noise`, without gradients. `model` receives the scaled sample and the
/// timestep.
///
/// # Errors
/// Those of `model` and of the steps.
pub fn sample(
    sampler: &mut dyn Sampler,
    noise: &Tensor,
    mut model: impl FnMut(&Tensor, f64) -> Result<Tensor>,
) -> Result<Tensor> {
    let _no_grad = no_grad();
    let mut x = sampler.init_noise(noise)?;
    for i in 0..sampler.timesteps().len() {
        let output = model(&sampler.scale_input(&x, i)?, sampler.timesteps()[i])?;
        x = sampler.step(&output, i, &x)?;
    }
    Ok(x)
}

const OP: &str = "sampler";

/// `x` in the dtype that samples have: f64 if `x` is f64, otherwise f32.
fn in_sample_dtype(x: &Tensor) -> Result<Tensor> {
    if x.dtype() == DType::F64 { Ok(x.clone()) } else { x.to_dtype(DType::F32) }
}

/// The model's output and `x`, after a check that their shapes are equal, both in the dtype that samples have.
fn checked(model_output: &Tensor, x: &Tensor) -> Result<(Tensor, Tensor)> {
    if model_output.dims() != x.dims() {
        return Err(Error::shape(
            OP,
            format!(
                "the model's output has shape {:?}, expected {:?}, the shape of the sample",
                model_output.dims(),
                x.dims()
            ),
        ));
    }
    let x = in_sample_dtype(x)?;
    Ok((model_output.to_dtype(x.dtype())?, x))
}

/// Checks that a run of `steps` steps has a step `i`.
fn check_step(i: usize, steps: usize) -> Result<()> {
    if i < steps {
        return Ok(());
    }
    Err(Error::argument(OP, format!("found step {i}, expected 0 to {}", steps - 1)))
}

/// a · x + b · y.
fn combined(a: f64, x: &Tensor, b: f64, y: &Tensor) -> Result<Tensor> {
    x.mul_scalar(a)?.add(&y.mul_scalar(b)?)
}

/// Solve `x` = `signal` · data + `noise` · ε for the data, given the model's output. ε is standard normal noise.
fn denoised(prediction: PredictionType, x: &Tensor, output: &Tensor, signal: f64, noise: f64) -> Result<Tensor> {
    match prediction {
        PredictionType::Epsilon => combined(1.0 / signal, x, -noise / signal, output),
        PredictionType::VPrediction => {
            // The velocity v = √ᾱ · ε - √(1 - ᾱ) · data is defined for y = √ᾱ · data + √(1 - ᾱ) · ε, so
            // data = √ᾱ · y - √(1 - ᾱ) · v. Here y is x / length, √ᾱ is signal / length, √(1 - ᾱ) is noise / length.
            let length = signal.hypot(noise);
            combined(signal / (length * length), x, -noise / length, output)
        }
    }
}

#[cfg(test)]
mod tests;
