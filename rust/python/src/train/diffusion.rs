//! The objective of diffusion models.

use pyo3::prelude::*;
use trainable_candle_train::objective::{self, DiffusionConfig, SigmaDistribution};

use super::NoiseSchedule;
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, compute};
use crate::device;
use crate::error::Result;
use crate::rng::sample_numbers;
use crate::tensor::Tensor;

/// A noised batch: the model's input, and the target of the model's prediction.
///
/// ```python
/// objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule())
/// noised = objective.noise(tc.randn(2, 4, 8, 8))
/// assert noised.timesteps.shape == (2,) and noised.target.shape == (2, 4, 8, 8)
/// ```
///
/// Args:
///     sample: the noised latents, (B, C, ...).
///     timesteps: the timestep of each example, (B,), i64 or u32.
///     target: the target of the prediction, in the shape of the latents, f32.
#[pyclass(frozen, module = "trainable_candle.train")]
pub struct NoisedLatents(objective::NoisedLatents);

#[pymethods]
impl NoisedLatents {
    #[new]
    fn new(sample: &Tensor, timesteps: &Tensor, target: &Tensor) -> Self {
        let [sample, timesteps, target] = [sample, timesteps, target].map(|tensor| tensor.0.clone());
        Self(objective::NoisedLatents { sample, timesteps, target })
    }

    /// The noised latents, in the shape and dtype of the latents without noise.
    #[getter]
    fn sample(&self) -> Tensor {
        Tensor(self.0.sample.clone())
    }

    /// The timestep of each example: (B,), i64, or the dtype of the timesteps that `noise_at` got.
    #[getter]
    fn timesteps(&self) -> Tensor {
        Tensor(self.0.timesteps.clone())
    }

    /// The target of the prediction, in the shape of the latents, f32.
    #[getter]
    fn target(&self) -> Tensor {
        Tensor(self.0.target.clone())
    }
}

/// The objective of diffusion models such as SDXL, which predict the noise or the velocity of noised latents.
///
/// ```python
/// objective = tc.train.DiffusionObjective(tc.train.NoiseSchedule(), min_snr_gamma=5.0)
/// noised = objective.noise(tc.randn(2, 4, 8, 8))
/// prediction = tc.zeros(2, 4, 8, 8)  # a model computes it from noised.sample and noised.timesteps
/// loss = objective.loss(prediction, noised)
/// ```
///
/// Args:
///     schedule: the noise schedule of the model's training.
///     timesteps: the distribution of timesteps: "uniform", "logit_normal" or "mode" (arXiv:2403.03206).
///     logit_mean: for "logit_normal", the mean of the normal distribution; a positive mean favours noisy timesteps.
///     logit_std: for "logit_normal", the standard deviation of the normal distribution, above 0.
///     shift: a number above 1 shifts the timesteps towards noise, a number below 1 towards data; 1 changes nothing.
///     min_timestep: the first timestep that may be drawn.
///     max_timestep: the timestep after the last one that may be drawn; None means the number of timesteps of the
///         schedule.
///     min_snr_gamma: gamma of min-SNR weights (arXiv:2303.09556). The weight of a timestep in the loss is min(SNR,
///         gamma) / SNR if the model predicts noise, and min(SNR, gamma) / (SNR + 1) if it predicts velocities. SNR is
///         the timestep's signal-to-noise ratio. The paper uses 5; with None all timesteps have the weight 1.
///     noise_offset: the standard deviation of additional noise that has one value for each channel of each example. 0
///         adds none; up to about 0.1 is usual.
///     multires_noise_iterations: the largest number of levels of multiresolution noise. The first level is normal
///         noise of the size of the latents. Each further level has a lower resolution and is enlarged to that size.
///         All levels are added to the noise of the latents, and the sum is scaled to a standard deviation of 1 over
///         the example. 0 adds no levels; 6 to 10 are usual. Levels need latents (B, C, H, W).
///     multires_noise_discount: the weight of each level after the first, divided by the weight of the level before it;
///         above 0 and below 1.
///     loss: the loss of an element: "mse", "l1", "huber" (torch's huber_loss) or "smooth_l1" (the Huber loss divided
///         by delta).
///     huber_delta: delta of the losses "huber" and "smooth_l1", above 0, and at most 1 unless `huber_schedule` is
///         "constant". These losses are linear for differences above delta.
///     huber_schedule: the delta of timestep t of the schedule's T timesteps (arXiv:2403.16728), where d is
///         `huber_delta`: "constant" for d, "exponential" for d ** (t / T), "snr" for
///         (1 - d) / (1 + sigma) ** 2 + d, where sigma is `schedule.sigmas[t]`.
///     device: the device of the latents.
///
/// Raises:
///     ArgumentError: if a name is unknown, if a number is out of range, or if the model predicts noise and a timestep
///         of pure noise may be drawn.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
#[pyclass(frozen, module = "trainable_candle.train")]
pub struct DiffusionObjective(objective::DiffusionObjective);

#[pymethods]
impl DiffusionObjective {
    #[new]
    #[pyo3(signature = (schedule, *, timesteps="uniform", logit_mean=Argument::of(0.0), logit_std=Argument::of(1.0), shift=Argument::of(1.0), min_timestep=Integer::of(0),
        max_timestep=None, min_snr_gamma=Argument::of(None), noise_offset=Argument::of(0.0), multires_noise_iterations=Integer::of(0),
        multires_noise_discount=Argument::of(0.3), loss="mse", huber_delta=Argument::of(0.1), huber_schedule="constant",
        device="cpu"))]
    #[allow(clippy::too_many_arguments)] // each is a setting of a run
    fn new(
        schedule: &NoiseSchedule,
        timesteps: &str,
        logit_mean: Argument<f64>,
        logit_std: Argument<f64>,
        shift: Argument<f64>,
        min_timestep: Integer,
        max_timestep: Option<Integer>,
        min_snr_gamma: Argument<Option<f64>>,
        noise_offset: Argument<f64>,
        multires_noise_iterations: Integer,
        multires_noise_discount: Argument<f64>,
        loss: &str,
        huber_delta: Argument<f64>,
        huber_schedule: &str,
        device: &str,
    ) -> Result<Self> {
        const OP: &str = "DiffusionObjective";
        let device = device::parse(device)?;
        let timesteps = match timesteps.parse()? {
            SigmaDistribution::LogitNormal { .. } => SigmaDistribution::LogitNormal {
                mean: logit_mean.get(OP, "logit_mean")?,
                std: logit_std.get(OP, "logit_std")?,
            },
            other => other,
        };
        let config = DiffusionConfig {
            timesteps,
            shift: shift.get(OP, "shift")?,
            min_timestep: min_timestep.count(OP, "min_timestep")?,
            max_timestep: max_timestep.map(|end| end.count(OP, "max_timestep")).transpose()?,
            min_snr_gamma: min_snr_gamma.get(OP, "min_snr_gamma")?,
            noise_offset: noise_offset.get(OP, "noise_offset")?,
            multires_noise_iterations: multires_noise_iterations.count(OP, "multires_noise_iterations")?,
            multires_noise_discount: multires_noise_discount.get(OP, "multires_noise_discount")?,
            loss: loss.parse()?,
            huber_delta: huber_delta.get(OP, "huber_delta")?,
            huber_schedule: huber_schedule.parse()?,
        };
        Ok(Self(catch_panics(|| objective::DiffusionObjective::new(&schedule.0, config, &device))?))
    }

    /// Add noise to latents, each example at its own timestep.
    ///
    /// Args:
    ///     latents: (B, C, ...).
    ///     samples: the sample number of each example; a training run numbers its samples from 0. If given, an
    ///         example's noise and timestep depend only on its sample number and `seed`, and the library's generator
    ///         does not advance. By default, noise and timesteps come from the library's generator.
    ///     seed: the seed of the run; it has an effect only with `samples`.
    ///
    /// Raises:
    ///     ShapeError: if the latents have fewer than two dimensions, or other than four for multiresolution noise, or
    ///         if `samples` does not have one number for each example.
    ///     DTypeError: if the latents are not floating point.
    ///     DeviceError: if the latents are on another device than the objective.
    ///     ArgumentError: if `seed` or a sample number is outside the range 0 to 2**64 - 1.
    #[pyo3(signature = (latents, samples=None, seed=Integer::of(0)))]
    fn noise(
        &self,
        py: Python<'_>,
        latents: &Tensor,
        samples: Option<Vec<Integer>>,
        seed: Integer,
    ) -> Result<NoisedLatents> {
        const OP: &str = "noise";
        let samples = samples.map(|samples| sample_numbers(OP, &samples)).transpose()?;
        let seed = seed.as_u64(OP, "seed")?;
        let add_noise = || match &samples {
            Some(samples) => self.0.noise_for(&latents.0, samples, seed),
            None => self.0.noise(&latents.0),
        };
        compute(py, latents.0.elem_count(), add_noise).map(NoisedLatents)
    }

    /// Add given noise to latents at given timesteps.
    ///
    /// Args:
    ///     latents: (B, C, ...).
    ///     noise: in the shape of the latents.
    ///     timesteps: (B,), i64 or u32.
    ///
    /// Raises:
    ///     ShapeError: if the latents have fewer than two dimensions, or the three shapes do not fit together.
    ///     DTypeError: if the latents are not floating point, or the timesteps are neither i64 nor u32.
    ///     DeviceError: if a tensor is on another device than the objective.
    ///     IndexOutOfRangeError: if the schedule does not have one of the timesteps.
    fn noise_at(&self, py: Python<'_>, latents: &Tensor, noise: &Tensor, timesteps: &Tensor) -> Result<NoisedLatents> {
        compute(py, latents.0.elem_count(), || self.0.noise_at(&latents.0, &noise.0, &timesteps.0)).map(NoisedLatents)
    }

    /// Add noise to latents for a validation loss. With the same `seed`, an example has the same noise and timestep in
    /// every call and in any batch. The library's generator does not advance. The timesteps of examples with
    /// consecutive numbers are spread evenly over the whole range of timesteps.
    ///
    /// Args:
    ///     latents: (B, C, ...).
    ///     examples: the number of each example in the validation set, from 0.
    ///     seed: the seed of the noise; the timesteps do not depend on it.
    ///
    /// Raises:
    ///     ShapeError: if the latents have fewer than two dimensions, or if `examples` does not have one number for
    ///         each example of the batch.
    ///     DTypeError: if the latents are not floating point.
    ///     DeviceError: if the latents are on another device than the objective.
    ///     ArgumentError: if `seed` is outside the range 0 to 2**64 - 1, or a number in `examples` is outside the range
    ///         0 to 2**32 - 1.
    #[pyo3(signature = (latents, examples, seed=Integer::of(0)))]
    fn validation_noise(
        &self,
        py: Python<'_>,
        latents: &Tensor,
        examples: Vec<Integer>,
        seed: Integer,
    ) -> Result<NoisedLatents> {
        const OP: &str = "validation_noise";
        let examples =
            examples.iter().map(|number| number.as_u32(OP, "an example's number")).collect::<Result<Vec<u32>>>()?;
        let seed = seed.as_u64(OP, "seed")?;
        let add_noise = || self.0.validation_noise(&latents.0, &examples, seed);
        compute(py, latents.0.elem_count(), add_noise).map(NoisedLatents)
    }

    /// Compute the loss of a prediction. An example's loss is the mean of the losses of its elements, weighted by
    /// `mask` and multiplied by the example's min-SNR weight and its entry in `weights`. The result is the mean over
    /// the examples of the batch.
    ///
    /// Args:
    ///     prediction: the model's output for `noised.sample` at `noised.timesteps`.
    ///     noised: a result of `noise`, `noise_at` or `validation_noise`.
    ///     mask: the weight of each spatial position of each example, at least 0. The shape is (B, 1, ...) with the
    ///         spatial size of the latents. An example's mask is divided by its mean, so that the area of the mask does
    ///         not change the weight of the example. An example whose mask is 0 everywhere has loss 0.
    ///     weights: the weight of each example, (B,), such as the weight of the prior loss for regularisation images.
    ///
    /// Returns:
    ///     A scalar in f32.
    ///
    /// Raises:
    ///     ShapeError: if the shape of an argument does not fit `noised`.
    ///     DeviceError: if the tensors are on different devices.
    #[pyo3(signature = (prediction, noised, mask=None, weights=None))]
    fn loss(
        &self,
        py: Python<'_>,
        prediction: &Tensor,
        noised: &NoisedLatents,
        mask: Option<&Tensor>,
        weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (mask, weights) = (mask.map(|mask| &mask.0), weights.map(|weights| &weights.0));
        compute(py, prediction.0.elem_count(), || self.0.loss(&prediction.0, &noised.0, mask, weights)).map(Tensor)
    }
}
