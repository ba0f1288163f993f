//! DPM-Solver++, the multistep method of second order.
//!
//! Follows <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_dpmsolver_multistep.py#L921>.

use trainable_candle_core::{Error, Result, Tensor};

use super::{OP, Sampler, check_step, checked, combined, denoised, grid, in_sample_dtype};
use crate::objective::{NoiseSchedule, PredictionType, TimestepSpacing};

/// DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2) in x = α · data + √(1 - α²) · noise, with the
/// timesteps of diffusers' `DPMSolverMultistepScheduler` (`dpmsolver++`, order 2, midpoint). The first and the last
/// step are of first order.
#[derive(Clone, Debug)]
pub struct DpmSolver {
    prediction: PredictionType,
    timesteps: Vec<f64>,
    sigmas: Vec<f64>,
    /// The estimate of the data in the step taken last, and the index of the step that must follow unless step 0 starts
    /// a new run.
    previous: Option<(Tensor, usize)>,
}

impl DpmSolver {
    /// Starts a run; see [`SamplerKind::start`](super::SamplerKind::start).
    ///
    /// # Errors
    /// Those of [`SamplerKind::start`](super::SamplerKind::start).
    pub fn new(schedule: &NoiseSchedule, steps: usize, karras: bool) -> Result<Self> {
        // The noise-to-data ratio at each timestep of the training, ascending.
        let all = schedule.sigmas();
        // Of `steps + 1` spaced timesteps, only the first `steps`, at which steps start: the last step ends at σ = 0,
        // pushed below, and not at the remaining timestep.
        let mut timesteps = grid::spaced(schedule, steps + 1, steps)?;
        // As in diffusers, this sampler has whole timesteps. The other spacings give whole timesteps already.
        if schedule.config().timestep_spacing == TimestepSpacing::Linspace {
            timesteps.iter_mut().for_each(|t| *t = t.round_ties_even());
        }
        let mut sigmas = grid::sigmas_at(&all, &timesteps);
        if karras {
            sigmas = grid::karras(all[all.len() - 1], all[0], steps);
            timesteps = sigmas.iter().map(|&sigma| grid::timestep_of(&all, sigma).round_ties_even()).collect();
        }
        sigmas.push(0.0);
        Ok(Self { prediction: schedule.prediction_type(), timesteps, sigmas, previous: None })
    }
}

/// The coefficients (α, √(1 - α²)) of the data and the noise in x at the noise-to-data ratio σ = √(1 - α²) / α.
fn shares(sigma: f64) -> (f64, f64) {
    let alpha = 1.0 / sigma.hypot(1.0);
    (alpha, sigma * alpha)
}

impl Sampler for DpmSolver {
    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn sigmas(&self) -> &[f64] {
        &self.sigmas
    }

    fn init_noise(&self, noise: &Tensor) -> Result<Tensor> {
        in_sample_dtype(noise)
    }

    fn scale_input(&self, x: &Tensor, i: usize) -> Result<Tensor> {
        check_step(i, self.timesteps.len())?;
        Ok(x.clone())
    }

    fn step(&mut self, model_output: &Tensor, i: usize, x: &Tensor) -> Result<Tensor> {
        let steps = self.timesteps.len();
        check_step(i, steps)?;
        let expected = self.previous.as_ref().map_or(0, |(_, following)| *following);
        if i != 0 && i != expected {
            return Err(Error::argument(OP, format!("found step {i}, expected step {expected}; steps go in order")));
        }
        let (output, x) = checked(model_output, x)?;
        let (sigma, next) = (self.sigmas[i], self.sigmas[i + 1]);
        let ((alpha, noise_share), (next_alpha, next_noise_share)) = (shares(sigma), shares(next));
        let data = denoised(self.prediction, &x, &output, alpha, noise_share)?;
        // In the paper, λ = -ln σ, and h is λ at the end of the step minus λ at its start, so e^-h = next / sigma.
        let factor = next_alpha * (1.0 - next / sigma);
        // Except in the first and the last step, extrapolate the data linearly in λ, to the middle of the step.
        let direction = match self.previous.take() {
            Some((previous, _)) if i != 0 && i + 1 < steps => {
                // h of the previous step, divided by h of this step.
                let ratio = (self.sigmas[i - 1] / sigma).ln() / (sigma / next).ln();
                combined(1.0 + 0.5 / ratio, &data, -0.5 / ratio, &previous)?
            }
            _ => data.clone(),
        };
        self.previous = Some((data, i + 1));
        combined(next_noise_share / noise_share, &x, factor, &direction)
    }
}
