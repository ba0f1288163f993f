//! Euler's method for the probability flow of a diffusion model.
//!
//! Follows <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_euler_discrete.py#L143>.

use trainable_candle_core::{Result, Tensor};

use super::{Sampler, check_step, checked, combined, denoised, grid, in_sample_dtype};
use crate::objective::{NoiseSchedule, PredictionType, TimestepSpacing};

/// Euler's method in x = data + σ · noise (Karras et al. 2022, arXiv:2206.00364, algorithm 1). The timesteps and the
/// factors of the initial noise and of the model's input are those of diffusers' `EulerDiscreteScheduler`.
#[derive(Clone, Debug)]
pub struct Euler {
    prediction: PredictionType,
    timesteps: Vec<f64>,
    sigmas: Vec<f64>,
    /// The factor of the initial noise.
    init_sigma: f64,
}

impl Euler {
    /// Starts a run; see [`SamplerKind::start`](super::SamplerKind::start).
    ///
    /// # Errors
    /// Those of [`SamplerKind::start`](super::SamplerKind::start).
    pub fn new(schedule: &NoiseSchedule, steps: usize, karras: bool) -> Result<Self> {
        // The noise levels of all timesteps of training.
        let all = schedule.sigmas();
        // `spaced` chooses `count` timesteps and returns the first `steps` of them. A sampler that needs a timestep at
        // the end of the last step passes `steps` + 1 as `count`; Euler's method needs no such timestep.
        let count = steps;
        let mut timesteps = grid::spaced(schedule, count, steps)?;
        let mut sigmas = grid::sigmas_at(&all, &timesteps);
        if karras {
            sigmas = grid::karras(sigmas[0], sigmas[steps - 1], steps);
            timesteps = sigmas.iter().map(|&sigma| grid::timestep_of(&all, sigma)).collect();
        }
        let init_sigma = match schedule.config().timestep_spacing {
            TimestepSpacing::Leading => sigmas[0].hypot(1.0),
            TimestepSpacing::Linspace | TimestepSpacing::Trailing => sigmas[0],
        };
        // The last step ends without noise.
        sigmas.push(0.0);
        Ok(Self { prediction: schedule.prediction_type(), timesteps, sigmas, init_sigma })
    }
}

impl Sampler for Euler {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn sigmas(&self) -> &[f64] {
        &self.sigmas
    }

    fn init_noise(&self, noise: &Tensor) -> Result<Tensor> {
        in_sample_dtype(noise)?.mul_scalar(self.init_sigma)
    }

    fn scale_input(&self, x: &Tensor, i: usize) -> Result<Tensor> {
        check_step(i, self.timesteps.len())?;
        x.mul_scalar(1.0 / self.sigmas[i].hypot(1.0))
    }

    fn step(&mut self, model_output: &Tensor, i: usize, x: &Tensor) -> Result<Tensor> {
        check_step(i, self.timesteps.len())?;
        let (output, x) = checked(model_output, x)?;
        let (sigma, next) = (self.sigmas[i], self.sigmas[i + 1]);
        if self.prediction == PredictionType::Epsilon {
            // x + (next - sigma) · output.
            return combined(1.0, &x, next - sigma, &output);
        }
        // x = signal · data + sigma · noise.
        let signal = 1.0;
        let data = denoised(self.prediction, &x, &output, signal, sigma)?;
        // next / sigma · x + (1 - next / sigma) · data.
        combined(next / sigma, &x, 1.0 - next / sigma, &data)
    }
}
