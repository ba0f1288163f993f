//! The flow-matching objective.

use pyo3::prelude::*;
use trainable_candle_train::objective;
use trainable_candle_train::sampler;

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, compute};
use crate::error::Result;
use crate::rng::sample_numbers;
use crate::tensor::Tensor;

/// The flow-matching objective. At noise level sigma, the model receives `(1 - sigma) * data + sigma * noise` and
/// predicts the velocity `noise - data`.
///
/// ```python
/// flow = tc.train.FlowMatching("logit_normal", shift=3.0)
/// sample, levels, target = flow.noise(tc.randn(2, 16, 8, 8))
/// loss = F.mse_loss(tc.zeros(2, 16, 8, 8), target)
/// assert flow.sigmas(4)[0] == 1.0
/// ```
///
/// Args:
///     distribution: the distribution of noise levels from 0 (data) to 1 (noise): "uniform", "logit_normal" or "mode"
///         (arXiv:2403.03206).
///     shift: a finite number above 0. Each level sigma becomes `shift * sigma / (1 + (shift - 1) * sigma)`. A shift
///         above 1 moves levels towards noise, a shift below 1 towards data.
///
/// Raises:
///     ArgumentError: if the distribution is unknown, or the shift is not a finite number above 0.
#[pyclass(frozen, module = "trainable_candle.train")]
pub struct FlowMatching {
    objective: objective::FlowMatching,
    shift: f64,
}

#[pymethods]
impl FlowMatching {
    #[new]
    #[pyo3(signature = (distribution="uniform", shift=Argument::of(1.0)))]
    fn new(distribution: &str, shift: Argument<f64>) -> Result<Self> {
        let shift = shift.get("FlowMatching", "shift")?;
        Ok(Self { objective: objective::FlowMatching::new(distribution.parse()?, shift)?, shift })
    }

    /// Add noise to a batch of data, each example at its own noise level.
    ///
    /// Args:
    ///     data: (B, ...), floating point; B is the number of examples.
    ///     samples: the sample number of each example; a training run numbers its samples from 0. If given, an
    ///         example's noise and noise level depend only on its sample number and `seed`, and the library's generator
    ///         does not advance. By default, noise and levels come from the library's generator.
    ///     seed: the seed of the training run; without `samples` it has no effect.
    ///
    /// Returns:
    ///     The noised data, the noise levels, and the target of the prediction, `noise - data`. The levels are (B,),
    ///     f32. The noised data and the target have the shape and dtype of the data.
    ///
    /// Raises:
    ///     ShapeError: if the data has no dimension, or `samples` does not have one number for each example.
    ///     DTypeError: if the data is not floating point.
    ///     ArgumentError: if a sample number or the seed is not from 0 to 2**64 - 1.
    #[pyo3(signature = (data, samples=None, seed=Integer::of(0)))]
    fn noise(
        &self,
        py: Python<'_>,
        data: &Tensor,
        samples: Option<Vec<Integer>>,
        seed: Integer,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        const OP: &str = "noise";
        let samples = samples.map(|samples| sample_numbers(OP, &samples)).transpose()?;
        let seed = seed.as_u64(OP, "seed")?;
        let work = || match &samples {
            Some(samples) => self.objective.noise_for(&data.0, samples, seed),
            None => self.objective.noise(&data.0),
        };
        // `compute` releases the GIL if there are many elements.
        compute(py, data.0.elem_count(), work).map(into_tuple)
    }

    /// Add noise to data for a validation loss. With the same seed, an example has the same noise and noise level in
    /// every call and in any batch. The library's generator does not advance.
    ///
    /// Args:
    ///     data: (B, ...), floating point; B is the number of examples.
    ///     examples: the index of each example in the validation set.
    ///     seed: the seed of noise and levels.
    ///
    /// Returns:
    ///     The same as `noise`.
    ///
    /// Raises:
    ///     ShapeError: if the data has no dimension, or `examples` does not have one index for each example of the
    ///         batch.
    ///     DTypeError: if the data is not floating point.
    ///     ArgumentError: if an index or the seed is not from 0 to 2**64 - 1.
    #[pyo3(signature = (data, examples, seed=Integer::of(0)))]
    fn validation_noise(
        &self,
        py: Python<'_>,
        data: &Tensor,
        examples: Vec<Integer>,
        seed: Integer,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        const OP: &str = "validation_noise";
        // The indices of examples have the range of sample numbers, so they are converted like these.
        let (examples, seed) = (sample_numbers(OP, &examples)?, seed.as_u64(OP, "seed")?);
        let work = || self.objective.validation_noise(&data.0, &examples, seed);
        compute(py, data.0.elem_count(), work).map(into_tuple)
    }

    /// Return the noise levels of `steps` sampling steps: `steps + 1` numbers from 1 down to 0, which are evenly spaced
    /// before they are shifted by `shift`.
    ///
    /// Raises:
    ///     ArgumentError: if `steps` is less than 1.
    fn sigmas(&self, steps: Integer) -> Result<Vec<f64>> {
        let steps = steps.count("sigmas", "steps")?;
        catch_panics(|| sampler::flow_sigmas(steps, self.shift))
    }

    /// Take one step of Euler's method: move a sample along the velocity to another noise level.
    ///
    /// Args:
    ///     sample: the noised data.
    ///     velocity: the model's output for `sample` at `sigma`, in the shape of `sample`.
    ///     sigma: the noise level of `sample`.
    ///     next_sigma: the noise level of the result.
    ///
    /// Returns:
    ///     `sample + (next_sigma - sigma) * velocity`, in the dtype of `sample`.
    ///
    /// Raises:
    ///     ShapeError: if `velocity` does not have the shape of `sample`.
    ///     DeviceError: if `velocity` is on another device than `sample`.
    fn euler_step(
        &self,
        py: Python<'_>,
        sample: &Tensor,
        velocity: &Tensor,
        sigma: Argument<f64>,
        next_sigma: Argument<f64>,
    ) -> Result<Tensor> {
        let (sigma, next_sigma) = (sigma.get("euler_step", "sigma")?, next_sigma.get("euler_step", "next_sigma")?);
        compute(py, sample.0.elem_count(), || sampler::euler_step(&sample.0, &velocity.0, sigma, next_sigma))
            .map(Tensor)
    }
}

/// The three tensors that `noise` and `validation_noise` return, as Python gets them.
fn into_tuple(noised: objective::Noised) -> (Tensor, Tensor, Tensor) {
    (Tensor(noised.sample), Tensor(noised.sigmas), Tensor(noised.target))
}
