//! Draws noise levels for training.

use std::f64::consts::PI;

use trainable_candle_core::rng::{self, Purpose};
use trainable_candle_core::{DType, Device, Error, Result, Tensor};

/// The distribution of noise levels from 0 (data) to 1 (noise).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SigmaDistribution {
    /// Every level from 0 to 1 is equally likely.
    Uniform,
    /// The logistic function of a normally distributed value. Levels near 0.5 are more frequent than with a uniform
    /// distribution (Esser et al. 2024, arXiv:2403.03206).
    LogitNormal {
        /// Mean of the normal distribution. A positive mean makes levels near 1 (noise) more frequent.
        mean: f64,
        /// Standard deviation of the normal distribution, above 0.
        std: f64,
    },
    /// 1 − u − scale · (cos²(π u / 2) − 1 + u) for uniform u (arXiv:2403.03206, section 3.1, "mode sampling with heavy
    /// tails"). A positive scale makes levels near 0.5 more frequent; a negative scale makes levels near 0 and near 1
    /// more frequent.
    Mode {
        /// A number from −1 to 2 / (π − 2), the range in which the function decreases with u.
        scale: f64,
    },
}

/// The scale of [`SigmaDistribution::Mode`] with the best results in arXiv:2403.03206.
const MODE_SCALE: f64 = 1.29;

impl std::str::FromStr for SigmaDistribution {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "uniform" => Ok(Self::Uniform),
            "logit_normal" => Ok(Self::LogitNormal { mean: 0.0, std: 1.0 }),
            "mode" => Ok(Self::Mode { scale: MODE_SCALE }),
            other => Err(Error::argument(
                "noise_levels",
                format!(
                    "unknown distribution of noise levels \"{other}\"; expected \"uniform\", \"logit_normal\" or \"mode\""
                ),
            )),
        }
    }
}

/// Draws noise levels from a distribution and shifts them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoiseLevels {
    distribution: SigmaDistribution,
    shift: f64,
}

impl NoiseLevels {
    /// Levels σ from `distribution`, shifted to shift · σ / (1 + (shift - 1) · σ). A shift above 1 moves levels towards
    /// noise, a shift below 1 towards data, and 1 changes nothing. Large images need a shift of about 3
    /// (arXiv:2403.03206, section 5.3.2).
    ///
    /// # Errors
    /// [`Error::Argument`], with the name `op` of the operation, if the shift or the standard deviation is not a finite
    /// number above 0, if the mean is not finite, or if the scale of [`SigmaDistribution::Mode`] is out of range.
    pub fn new(op: &'static str, distribution: SigmaDistribution, shift: f64) -> Result<Self> {
        if !(shift > 0.0 && shift.is_finite()) {
            return Err(Error::argument(op, format!("shift is {shift}, expected a number above 0")));
        }
        if let SigmaDistribution::LogitNormal { mean, std } = distribution
            && !(std > 0.0 && std.is_finite() && mean.is_finite())
        {
            return Err(Error::argument(
                op,
                format!(
                    "the logit-normal distribution has mean {mean} and deviation {std}, expected finite numbers and a deviation above 0"
                ),
            ));
        }
        if let SigmaDistribution::Mode { scale } = distribution
            && !(-1.0..=2.0 / (PI - 2.0)).contains(&scale)
        {
            return Err(Error::argument(
                op,
                format!("the scale of the mode is {scale}, expected -1 to {:.2}", 2.0 / (PI - 2.0)),
            ));
        }
        Ok(Self { distribution, shift })
    }

    /// Draw `count` levels from the library's generator: (count,), f32, on `device`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the levels do not fit in memory.
    pub fn draw(&self, count: usize, device: &Device) -> Result<Tensor> {
        let levels = match self.distribution {
            SigmaDistribution::Uniform => Tensor::rand(0.0, 1.0, count, DType::F32, device)?,
            SigmaDistribution::Mode { scale } => mode(&Tensor::rand(0.0, 1.0, count, DType::F32, device)?, scale)?,
            SigmaDistribution::LogitNormal { mean, std } => {
                Tensor::randn(mean, std, count, DType::F32, device)?.sigmoid()?
            }
        };
        self.shifted(levels)
    }

    /// Draw one level for each of the B sample numbers in `samples`: (B,), f32, on `device`. Each level comes from the
    /// stream of random numbers for `seed`, `purpose` and the sample number.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the levels do not fit in memory.
    pub fn draw_for(&self, samples: &[u64], purpose: Purpose, seed: u64, device: &Device) -> Result<Tensor> {
        let on_device = |values: Vec<f32>| Tensor::from_vec(values, samples.len(), &Device::Cpu)?.to_device(device);
        // How many numbers to draw for each sample.
        let size = 1;
        let levels = match self.distribution {
            SigmaDistribution::Uniform => on_device(rng::uniform_samples(seed, purpose, samples, size))?,
            SigmaDistribution::Mode { scale } => {
                mode(&on_device(rng::uniform_samples(seed, purpose, samples, size))?, scale)?
            }
            SigmaDistribution::LogitNormal { mean, std } => {
                on_device(rng::normal_samples(seed, purpose, samples, size))?.affine(std, mean)?.sigmoid()?
            }
        };
        self.shifted(levels)
    }

    fn shifted(&self, levels: Tensor) -> Result<Tensor> {
        if self.shift == 1.0 {
            return Ok(levels);
        }
        levels.mul_scalar(self.shift)?.div(&levels.affine(self.shift - 1.0, 1.0)?)
    }
}

/// The levels of [`SigmaDistribution::Mode`] for uniform numbers `u`.
fn mode(u: &Tensor, scale: f64) -> Result<Tensor> {
    let cos = u.mul_scalar(PI / 2.0)?.cos()?;
    // With s for the scale, 1 − u − s (cos² − 1 + u) = (1 + s)(1 − u) − s cos².
    u.affine(-(1.0 + scale), 1.0 + scale)?.sub(&cos.mul(&cos)?.mul_scalar(scale)?)?.clamp(Some(0.0), Some(1.0))
}

/// The shifted level shift · σ / (1 + (shift - 1) · σ) of the level σ.
pub(crate) fn shift_sigma(sigma: f64, shift: f64) -> f64 {
    shift * sigma / (1.0 + (shift - 1.0) * sigma)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(values: &[f32]) -> f64 {
        values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64
    }

    #[test]
    fn levels_follow_their_distribution() {
        let draw = |distribution, shift| {
            let levels = NoiseLevels::new("test", distribution, shift).unwrap().draw(40_000, &Device::Cpu).unwrap();
            levels.to_vec::<f32>().unwrap()
        };
        let uniform = draw(SigmaDistribution::Uniform, 1.0);
        assert!((mean(&uniform) - 0.5).abs() < 0.01);
        assert!(uniform.iter().all(|s| (0.0..1.0).contains(s)));
        // The expected value is E[3 u / (1 + 2 u)] = 3/2 - 3/4 ln 3 for uniform u.
        assert!((mean(&draw(SigmaDistribution::Uniform, 3.0)) - (1.5 - 0.75 * 3f64.ln())).abs() < 0.01);
        // The quartiles are diffusers' `compute_density_for_timestep_sampling("mode", mode_scale=1.29)` at u = 3/4, 1/2
        // and 1/4.
        let mut mode = draw("mode".parse().unwrap(), 1.0);
        mode.sort_by(f32::total_cmp);
        for (rank, expected) in [(10_000, 0.383_584), (20_000, 0.5), (30_000, 0.616_416)] {
            assert!((mode[rank] - expected).abs() < 0.01, "{} {expected}", mode[rank]);
        }
        assert!(mode[0] >= 0.0 && mode[mode.len() - 1] <= 1.0);
        // The median of the logit-normal distribution with mean 1 is the logistic function of 1.
        let mut skewed = draw(SigmaDistribution::LogitNormal { mean: 1.0, std: 1.0 }, 1.0);
        skewed.sort_by(f32::total_cmp);
        assert!((f64::from(skewed[20_000]) - 1.0 / (1.0 + (-1f64).exp())).abs() < 0.01);
    }

    #[test]
    fn impossible_settings_are_rejected() {
        assert!(NoiseLevels::new("test", SigmaDistribution::Uniform, 0.0).is_err());
        let without_deviation = SigmaDistribution::LogitNormal { mean: 0.0, std: f64::NAN };
        let message = NoiseLevels::new("test", without_deviation, 1.0).unwrap_err().to_string();
        assert!(message.starts_with("test: "), "{message}");
        // The largest scale is 2 / (π − 2), about 1.75.
        assert!(NoiseLevels::new("test", SigmaDistribution::Mode { scale: 2.0 }, 1.0).is_err());
        assert!("gaussian".parse::<SigmaDistribution>().unwrap_err().to_string().contains("logit_normal"));
    }
}
