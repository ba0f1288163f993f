//! The timesteps that a sampler visits, and their noise levels.
//!
//! Follows <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_euler_discrete.py#L350>
//! and <https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_dpmsolver_multistep.py#L367>.

use trainable_candle_core::{Error, Result};

use super::OP;
use crate::objective::{NoiseSchedule, TimestepSpacing};

/// The timesteps of `steps` steps: the first `steps` of `count` decreasing timesteps. For Euler's method `count` equals
/// `steps`. For DPM-Solver++ `count` is `steps` + 1: the extra timestep is the end of the last step. The trailing
/// spacing never includes the end of the last step, so it ignores `count`.
pub(super) fn spaced(schedule: &NoiseSchedule, count: usize, steps: usize) -> Result<Vec<f64>> {
    let config = schedule.config();
    let total = schedule.num_train_timesteps();
    if steps == 0 || count > total {
        // The timesteps that are no steps: none, or the extra one.
        let extra = count - steps;
        let most = total - extra.min(total);
        return Err(Error::argument(
            OP,
            format!("found {steps} steps, expected 1 to {most}: the schedule has {total} timesteps"),
        ));
    }
    let timesteps: Vec<f64> = match config.timestep_spacing {
        TimestepSpacing::Linspace => {
            let distance = if count == 1 { 0.0 } else { (total - 1) as f64 / (count - 1) as f64 };
            (0..count).rev().map(|i| i as f64 * distance).collect()
        }
        TimestepSpacing::Leading => {
            (0..count).rev().map(|i| (i * (total / count) + config.steps_offset) as f64).collect()
        }
        TimestepSpacing::Trailing => {
            let distance = total as f64 / steps as f64;
            (0..steps).map(|i| (total as f64 - i as f64 * distance).round_ties_even() - 1.0).collect()
        }
    };
    Ok(timesteps.into_iter().take(steps).collect())
}

/// The noise levels at `timesteps`, interpolated linearly between whole timesteps. `sigmas[t]` is the noise level of
/// the whole timestep `t`.
pub(super) fn sigmas_at(sigmas: &[f64], timesteps: &[f64]) -> Vec<f64> {
    let at = |&t: &f64| {
        let t = t.clamp(0.0, (sigmas.len() - 1) as f64);
        let (below, fraction) = (t as usize, t.fract());
        let above = (below + 1).min(sigmas.len() - 1);
        sigmas[below] + fraction * (sigmas[above] - sigmas[below])
    };
    timesteps.iter().map(at).collect()
}

/// `steps` noise levels from `first` down to `last`, spaced as in Karras et al. 2022 (arXiv:2206.00364, equation 5)
/// with ρ = 7.
pub(super) fn karras(first: f64, last: f64, steps: usize) -> Vec<f64> {
    const RHO: f64 = 7.0;
    let (first, last) = (first.powf(1.0 / RHO), last.powf(1.0 / RHO));
    let level = |i: usize| first + (last - first) * i as f64 / (steps.max(2) - 1) as f64;
    (0..steps).map(|i| level(i).powf(RHO)).collect()
}

/// The timestep of the noise level `sigma`, interpolated linearly in ln σ between two whole timesteps. `sigmas[t]` is
/// the noise level of the whole timestep `t`; the levels increase with `t`.
pub(super) fn timestep_of(sigmas: &[f64], sigma: f64) -> f64 {
    let below = sigmas.partition_point(|&s| s <= sigma).clamp(1, sigmas.len() - 1) - 1;
    let (low, high) = (sigmas[below].ln(), sigmas[below + 1].ln());
    below as f64 + ((sigma.ln() - low) / (high - low)).clamp(0.0, 1.0)
}
