//! The flow-matching objective.

use pyo3::prelude::*;
use trainable_candle_train::objective;
use trainable_candle_train::sampler;

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{compute, quick};
use crate::error::Result;
use crate::rng::words;
use crate::tensor::Tensor;

/// The flow-matching objective: the model receives (1 - s) * data + s * noise and predicts noise - data.
///
/// ```python
/// flow = tc.train.FlowMatching("logit_normal", shift=3.0)
/// sample, levels, target = flow.noise(tc.randn(2, 16, 8, 8))
/// loss = F.mse_loss(tc.zeros(2, 16, 8, 8), target)
/// assert flow.sigmas(4)[0] == 1.0
/// ```
///
/// Args:
///     distribution: the distribution of noise levels s from 0 (data) to 1 (noise): "uniform", "logit_normal" or "mode"
///         (arXiv:2403.03206).
///     shift: a number above 1 shifts the levels towards noise, a number below 1 towards data: level s becomes
///         shift * s / (1 + (shift - 1) * s).
///
/// Raises:
///     ArgumentError: if the distribution is unknown or the shift is not above 0.
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
    ///     data: (B, ...), floating point.
    ///     samples: the number of each example, counted through the whole training run. If given, an example's noise and
    ///         level depend only on its number and `seed`, and the library's generator does not advance. By default, the
    ///         library's generator gives noise and levels.
    ///     seed: the seed of the run; it has an effect only with `samples`.
    ///
    /// Returns:
    ///     The noised data, the noise levels (B,) in f32, and the target of the prediction, noise - data. Noised data and
    ///     target have the shape and dtype of the data.
    ///
    /// Raises:
    ///     ShapeError: if the data has no dimension, or `samples` does not have one number for each example.
    ///     DTypeError: if the data is not floating point.
    #[pyo3(signature = (data, samples=None, seed=Integer::of(0)))]
    fn noise(
        &self,
        py: Python<'_>,
        data: &Tensor,
        samples: Option<Vec<Integer>>,
        seed: Integer,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        const OP: &str = "noise";
        let samples = samples.map(|samples| words(OP, &samples)).transpose()?;
        let seed = seed.word(OP, "seed")?;
        let work = || match &samples {
            Some(samples) => self.objective.noise_for(&data.0, samples, seed),
            None => self.objective.noise(&data.0),
        };
        compute(py, data.0.elem_count(), work).map(parts)
    }

    /// Add noise to data for a validation loss. An example has the same noise and level in every call and in any batch.
    /// The library's generator does not advance.
    ///
    /// Args:
    ///     data: (B, ...), floating point.
    ///     examples: the number of each example in the validation set, from 0.
    ///     seed: the seed of noise and levels.
    ///
    /// Returns:
    ///     As `noise`.
    ///
    /// Raises:
    ///     ShapeError: if the data has no dimension, or `examples` does not have one number for each example of the batch.
    ///     DTypeError: if the data is not floating point.
    #[pyo3(signature = (data, examples, seed=Integer::of(0)))]
    fn validation_noise(
        &self,
        py: Python<'_>,
        data: &Tensor,
        examples: Vec<Integer>,
        seed: Integer,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        const OP: &str = "validation_noise";
        let (examples, seed) = (words(OP, &examples)?, seed.word(OP, "seed")?);
        let work = || self.objective.validation_noise(&data.0, &examples, seed);
        compute(py, data.0.elem_count(), work).map(parts)
    }

    /// Return the noise levels of `steps` sampling steps: `steps + 1` numbers from 1 down to 0.
    ///
    /// Raises:
    ///     ArgumentError: if `steps` is 0.
    fn sigmas(&self, steps: Integer) -> Result<Vec<f64>> {
        let steps = steps.count("sigmas", "steps")?;
        quick(|| sampler::flow_sigmas(steps, self.shift))
    }

    /// Take one step of Euler's method along a velocity.
    ///
    /// Args:
    ///     sample: the sample at noise level `sigma`.
    ///     velocity: the model's output for `sample` at `sigma`, in the shape of `sample`.
    ///     sigma: the noise level.
    ///     next_sigma: the noise level of the result.
    ///
    /// Returns:
    ///     sample + (next_sigma - sigma) * velocity.
    ///
    /// Raises:
    ///     ShapeError: if the shapes differ.
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

fn parts(noised: objective::Noised) -> (Tensor, Tensor, Tensor) {
    (Tensor(noised.sample), Tensor(noised.sigmas), Tensor(noised.target))
}
