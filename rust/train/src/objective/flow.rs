//! Rectified flow (Liu et al. 2022, arXiv:2209.03003; Lipman et al. 2022, arXiv:2210.02747) in the conventions of Stable
//! Diffusion 3 and Flux: x = (1 - σ) · data + σ · noise, and the model predicts dx/dσ = noise - data.

use trainable_candle_core::{DType, Error, Result, Tensor};

use super::levels::{NoiseLevels, SigmaDistribution};

/// The flow-matching objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowMatching {
    levels: NoiseLevels,
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
    /// Noise levels from `distribution`, moved by `shift` as in [`NoiseLevels::new`].
    ///
    /// # Errors
    /// [`Error::Argument`] if the shift or the deviation is not above 0.
    pub fn new(distribution: SigmaDistribution, shift: f64) -> Result<Self> {
        Ok(Self { levels: NoiseLevels::new("flow_matching", distribution, shift)? })
    }

    /// Noise for every element of `data (B, ...)` at a level for every example, from the library's generator.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` has no dimension, [`Error::DType`] if it is not floating point.
    pub fn noise(&self, data: &Tensor) -> Result<Noised> {
        let Some(&batch) = data.dims().first() else {
            return Err(Error::shape("flow_matching", "the data has no dimension, expected (B, ...)"));
        };
        let sigmas = self.levels.draw(batch, data.device())?;
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

#[cfg(test)]
mod tests {
    use trainable_candle_core::Device;

    use super::*;

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
}
