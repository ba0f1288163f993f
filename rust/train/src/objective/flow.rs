//! Rectified flow (Liu et al. 2022, arXiv:2209.03003; Lipman et al. 2022, arXiv:2210.02747) in the conventions of
//! Stable Diffusion 3 and Flux: x = (1 - σ) · data + σ · noise, and the model predicts dx/dσ = noise - data.

use trainable_candle_core::raw::is_float;
use trainable_candle_core::rng::Purpose;
use trainable_candle_core::{DType, Error, Result, Tensor};

use super::levels::{NoiseLevels, SigmaDistribution};
use super::{check_numbers, normal_rows};

const OP: &str = "flow_matching";

/// The flow-matching objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowMatching {
    levels: NoiseLevels,
}

/// A noised batch: the model's input, and the target of the model's prediction.
pub struct Noised {
    /// (1 - σ) · data + σ · noise, in the shape of the data.
    pub sample: Tensor,
    /// Noise levels σ (B,), f32.
    pub sigmas: Tensor,
    /// noise - data, in the shape of the data.
    pub target: Tensor,
}

impl FlowMatching {
    /// An objective that draws noise levels from `distribution` and shifts them by `shift` as [`NoiseLevels::new`]
    /// does.
    ///
    /// # Errors
    /// Those of [`NoiseLevels::new`].
    pub fn new(distribution: SigmaDistribution, shift: f64) -> Result<Self> {
        Ok(Self { levels: NoiseLevels::new(OP, distribution, shift)? })
    }

    /// Add noise to floating-point `data (B, ...)`, each example at its own noise level. The noise and the levels come
    /// from the library's generator.
    ///
    /// # Errors
    /// [`Error::Shape`] if `data` has no dimension, [`Error::DType`] if it is not floating point.
    pub fn noise(&self, data: &Tensor) -> Result<Noised> {
        let sigmas = self.levels.draw(batch_of(data)?, data.device())?;
        let noise = Tensor::randn(0.0, 1.0, data.shape(), DType::F32, data.device())?;
        noised(data, &noise, &sigmas)
    }

    /// As [`noise`](Self::noise), but the noise and the level of example i depend only on `seed` and its sample number
    /// `samples[i]`; a training run numbers its samples from 0. So noise and level are the same in every call and in
    /// any batch. The library's generator does not advance.
    ///
    /// # Errors
    /// As [`noise`](Self::noise); [`Error::Shape`] if `samples` does not have one number for each example.
    pub fn noise_for(&self, data: &Tensor, samples: &[u64], seed: u64) -> Result<Noised> {
        self.noise_from_streams(data, samples, seed, [Purpose::Level, Purpose::Noise])
    }

    /// As [`noise_for`](Self::noise_for), for a validation loss: `examples[i]` is the number of validation example i,
    /// and noise and levels come from streams of random numbers that training does not use.
    ///
    /// # Errors
    /// As [`noise_for`](Self::noise_for).
    pub fn validation_noise(&self, data: &Tensor, examples: &[u64], seed: u64) -> Result<Noised> {
        self.noise_from_streams(data, examples, seed, [Purpose::ValidationLevel, Purpose::ValidationNoise])
    }

    /// Add noise to `data (B, ...)`. The level and the noise of example i come from the random streams that `seed`, the
    /// number `numbers[i]` and the purposes `level` and `noise` select.
    fn noise_from_streams(
        &self,
        data: &Tensor,
        numbers: &[u64],
        seed: u64,
        [level, noise]: [Purpose; 2],
    ) -> Result<Noised> {
        batch_of(data)?; // an error for data without dimensions
        check_numbers(OP, data.dims(), numbers.len())?;
        let sigmas = self.levels.draw_for(numbers, level, seed, data.device())?;
        noised(data, &normal_rows(data.dims(), numbers, noise, seed, data.device())?, &sigmas)
    }
}

/// B of `data (B, ...)`.
fn batch_of(data: &Tensor) -> Result<usize> {
    let batch = data.dims().first().copied();
    batch.ok_or_else(|| Error::shape(OP, "the data has no dimension, expected (B, ...)"))
}

/// Mix `data (B, ...)` with `noise (B, ...)` at the levels `sigmas (B,)`. The mixture is computed in f32; noised data
/// and target have the dtype of the data.
///
/// # Errors
/// [`Error::Shape`] if the three shapes do not fit together, [`Error::DType`] if `data` is not floating point.
pub fn noised(data: &Tensor, noise: &Tensor, sigmas: &Tensor) -> Result<Noised> {
    if noise.dims() != data.dims() || data.dims().first().is_none_or(|batch| sigmas.dims() != [*batch]) {
        return Err(Error::shape(
            OP,
            format!(
                "data {:?}, noise {:?} and sigmas {:?} do not fit together; expected (B, ...), (B, ...) and (B,)",
                data.dims(),
                noise.dims(),
                sigmas.dims()
            ),
        ));
    }
    if !is_float(data.dtype()) {
        let found = data.dtype().as_str();
        return Err(Error::dtype(OP, format!("the data is {found}, expected floating point; convert it with to()")));
    }
    let (clean, noise) = (data.to_dtype(DType::F32)?, noise.to_dtype(DType::F32)?);
    let mut per_example = vec![1; data.rank()]; // becomes (B, 1, ..., 1)
    per_example[0] = data.dims()[0];
    let sigma = sigmas.to_dtype(DType::F32)?.reshape(per_example)?;
    let target = noise.sub(&clean)?;
    let sample = clean.add(&target.mul(&sigma)?)?;
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
    fn samples_are_mixtures_of_data_and_noise_and_other_inputs_are_rejected() {
        let cpu = Device::Cpu;
        let data = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], &cpu).unwrap();
        let noise = Tensor::new(&[[-1f32, 0.0], [1.0, 0.0], [7.0, 8.0]], &cpu).unwrap();
        let sigmas = Tensor::new(&[0f32, 0.25, 1.0], &cpu).unwrap();
        let result = noised(&data, &noise, &sigmas).unwrap();
        assert_eq!(result.sample.to_vec::<f32>().unwrap(), [1.0, 2.0, 2.5, 3.0, 7.0, 8.0]);
        assert_eq!(result.target.to_vec::<f32>().unwrap(), [-2.0, -2.0, -2.0, -4.0, 2.0, 2.0]);
        assert!(noised(&data, &noise, &sigmas.narrow(0, 0, 2).unwrap()).is_err());
        // A mixture with integer data is not an integer, so it cannot have the dtype of the data.
        let integers = data.to_dtype(DType::I64).unwrap();
        assert!(matches!(noised(&integers, &noise, &sigmas), Err(Error::DType { .. })));
    }

    #[test]
    fn the_number_of_a_sample_determines_its_noise_and_level() {
        let values = |x: &Tensor| x.to_vec::<f32>().unwrap();
        for distribution in ["uniform", "logit_normal", "mode"] {
            let flow = FlowMatching::new(distribution.parse().unwrap(), 3.0).unwrap();
            // Zeros, so that the target, noise - data, is the noise.
            let data = Tensor::zeros((4, 2, 3), DType::F32, &Device::Cpu).unwrap();
            let all = flow.noise_for(&data, &[10, 11, 12, 13], 5).unwrap();
            for (row, number) in (10..14).enumerate() {
                let one = flow.noise_for(&data.narrow(0, 0, 1).unwrap(), &[number], 5).unwrap();
                assert_eq!(values(&one.target), values(&all.target.narrow(0, row, 1).unwrap()));
                assert_eq!(values(&one.sigmas), values(&all.sigmas.narrow(0, row, 1).unwrap()));
            }
            let validation = flow.validation_noise(&data, &[10, 11, 12, 13], 5).unwrap();
            assert_ne!(values(&validation.target), values(&all.target));
            assert_ne!(values(&validation.sigmas), values(&all.sigmas));
            assert!(matches!(flow.noise_for(&data, &[1, 2], 5), Err(Error::Shape { .. })));
        }
    }
}
