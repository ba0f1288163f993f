//! Rectified flow (Liu et al. 2022, arXiv:2209.03003; Lipman et al. 2022, arXiv:2210.02747) in the conventions of Stable
//! Diffusion 3 and Flux: x = (1 - σ) · data + σ · noise, and the model predicts dx/dσ = noise - data.

use trainable_candle_core::{DType, Device, Error, Result, Tensor, rng};

/// How noise levels σ in (0, 1) are drawn for training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SigmaDistribution {
    /// All alike.
    Uniform,
    /// The logistic function of a normal value: the middle more often (Esser et al. 2024, arXiv:2403.03206).
    LogitNormal {
        /// Mean of the normal; positive favours noise.
        mean: f64,
        /// Deviation of the normal, above 0.
        std: f64,
    },
}

impl std::str::FromStr for SigmaDistribution {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "uniform" => Ok(Self::Uniform),
            "logit_normal" => Ok(Self::LogitNormal { mean: 0.0, std: 1.0 }),
            other => Err(Error::argument(
                "flow_matching",
                format!("unknown distribution of noise levels \"{other}\"; expected \"uniform\" or \"logit_normal\""),
            )),
        }
    }
}

/// The flow-matching objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowMatching {
    distribution: SigmaDistribution,
    shift: f64,
}

/// One batch as the model sees it, and what it should say.
pub struct Noised {
    /// (1 - σ) · data + σ · noise, the shape of the data.
    pub sample: Tensor,
    /// Noise levels σ (B), f32.
    pub sigmas: Tensor,
    /// noise - data, the shape of the data.
    pub target: Tensor,
}

impl FlowMatching {
    /// Noise levels from `distribution`, moved by `shift` towards noise (above 1) or data (below 1):
    /// σ → shift · σ / (1 + (shift - 1) · σ). Large pictures want about 3 (arXiv:2403.03206, section 5.3.2); 1 changes nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] if the shift or the deviation is not above 0.
    pub fn new(distribution: SigmaDistribution, shift: f64) -> Result<Self> {
        if !(shift > 0.0 && shift.is_finite()) {
            return Err(Error::argument("flow_matching", format!("shift is {shift}, expected a number above 0")));
        }
        if let SigmaDistribution::LogitNormal { mean, std } = distribution
            && !(std > 0.0 && std.is_finite() && mean.is_finite())
        {
            return Err(Error::argument(
                "flow_matching",
                format!(
                    "the logit-normal distribution has mean {mean} and deviation {std}, expected finite numbers, the deviation above 0"
                ),
            ));
        }
        Ok(Self { distribution, shift })
    }

    /// `count` noise levels from the library's generator.
    pub fn draw_sigmas(&self, count: usize) -> Vec<f32> {
        let sigmas = match self.distribution {
            SigmaDistribution::Uniform => rng::uniform_vec(count),
            SigmaDistribution::LogitNormal { mean, std } => rng::normal_vec(count)
                .into_iter()
                .map(|z| (1.0 / (1.0 + (-mean - std * f64::from(z)).exp())) as f32)
                .collect(),
        };
        sigmas.into_iter().map(|sigma| shift_sigma(f64::from(sigma), self.shift) as f32).collect()
    }

    /// Noise for every element of `data (B, ...)` at a level for every example, from the library's generator.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` has no dimension, [`Error::DType`] if it is not floating point.
    pub fn noise(&self, data: &Tensor) -> Result<Noised> {
        let Some(&batch) = data.dims().first() else {
            return Err(Error::shape("flow_matching", "the data has no dimension, expected (B, ...)"));
        };
        let sigmas = Tensor::from_vec(self.draw_sigmas(batch), batch, &Device::Cpu)?.to_device(data.device())?;
        let noise = Tensor::randn(0.0, 1.0, data.shape(), DType::F32, data.device())?;
        noised(data, &noise, &sigmas)
    }
}

/// `data (B, ...)` under `noise` of the same shape at the levels `sigmas (B)`; computed in f32, given in the dtype of the data.
///
/// # Errors
/// [`Error::Shape`] if the three do not fit together.
pub fn noised(data: &Tensor, noise: &Tensor, sigmas: &Tensor) -> Result<Noised> {
    if noise.dims() != data.dims() || data.dims().first().is_none_or(|batch| sigmas.dims() != [*batch]) {
        return Err(Error::shape(
            "flow_matching",
            format!(
                "data {:?}, noise {:?} and sigmas {:?} do not fit together; expected (B, ...), the same, and (B,)",
                data.dims(),
                noise.dims(),
                sigmas.dims()
            ),
        ));
    }
    let (clean, noise) = (data.to_dtype(DType::F32)?, noise.to_dtype(DType::F32)?);
    let mut per_example = vec![1; data.rank()];
    per_example[0] = data.dims()[0];
    let target = noise.sub(&clean)?;
    let sample = clean.add(&target.mul(&sigmas.to_dtype(DType::F32)?.reshape(per_example)?)?)?;
    Ok(Noised {
        sample: sample.to_dtype(data.dtype())?,
        sigmas: sigmas.clone(),
        target: target.to_dtype(data.dtype())?,
    })
}

/// σ → shift · σ / (1 + (shift - 1) · σ).
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
    fn sigmas_follow_their_distribution() {
        let draw = |distribution, shift| FlowMatching::new(distribution, shift).unwrap().draw_sigmas(40_000);
        let uniform = draw(SigmaDistribution::Uniform, 1.0);
        assert!((mean(&uniform) - 0.5).abs() < 0.01);
        assert!(uniform.iter().all(|s| (0.0..1.0).contains(s)));
        // E[3 u / (1 + 2 u)] = 3/2 - 3/4 ln 3 for uniform u.
        assert!((mean(&draw(SigmaDistribution::Uniform, 3.0)) - (1.5 - 0.75 * 3f64.ln())).abs() < 0.01);
        // A logit-normal of mean 1 has its median at the logistic function of 1.
        let mut skewed = draw(SigmaDistribution::LogitNormal { mean: 1.0, std: 1.0 }, 1.0);
        skewed.sort_by(f32::total_cmp);
        assert!((f64::from(skewed[20_000]) - 1.0 / (1.0 + (-1f64).exp())).abs() < 0.01);
    }

    #[test]
    fn sample_lies_between_data_and_noise() {
        let cpu = Device::Cpu;
        let data = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &cpu).unwrap();
        let noise = Tensor::new(&[[-1f32, 0.0], [1.0, 0.0], [7.0, 8.0]], &cpu).unwrap();
        let sigmas = Tensor::new(&[0f32, 0.25, 1.0], &cpu).unwrap();
        let result = noised(&data, &noise, &sigmas).unwrap();
        assert_eq!(result.sample.to_vec::<f32>().unwrap(), [1.0, 2.0, 2.5, 3.0, 7.0, 8.0]);
        assert_eq!(result.target.to_vec::<f32>().unwrap(), [-2.0, -2.0, -2.0, -4.0, 2.0, 2.0]);
        assert!(noised(&data, &noise, &sigmas.narrow(0, 0, 2).unwrap()).is_err());
    }

    #[test]
    fn impossible_settings_are_refused() {
        assert!(FlowMatching::new(SigmaDistribution::Uniform, 0.0).is_err());
        assert!(FlowMatching::new(SigmaDistribution::LogitNormal { mean: 0.0, std: f64::NAN }, 1.0).is_err());
        assert!("gaussian".parse::<SigmaDistribution>().unwrap_err().to_string().contains("logit_normal"));
    }
}
