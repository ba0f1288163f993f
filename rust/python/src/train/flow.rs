//! The flow-matching objective.

use pyo3::prelude::*;
use trainable_candle_train::objective;
use trainable_candle_train::sampler;

use crate::arguments::Integer;
use crate::call::{compute, quick};
use crate::error::Result;
use crate::given::Given;
use crate::tensor::Tensor;

/// The flow-matching objective: a model sees (1 - s) * data + s * noise and predicts noise - data.
///
/// Args:
///     distribution: how noise levels s in (0, 1) are drawn: "uniform" or "logit_normal".
///     shift: moves them towards noise (above 1) or data (below 1); 1 changes nothing.
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
    #[pyo3(signature = (distribution="uniform", shift=Given::of(1.0)))]
    fn new(distribution: &str, shift: Given<f64>) -> Result<Self> {
        let shift = shift.get("FlowMatching", "shift")?;
        Ok(Self { objective: objective::FlowMatching::new(distribution.parse()?, shift)?, shift })
    }

    /// Put noise on a batch of data, each example at a level of its own.
    ///
    /// Args:
    ///     data: (B, ...).
    ///
    /// Returns:
    ///     The noised data, the noise levels (B,) in f32, and what a model should say of them (noise - data).
    ///
    /// Raises:
    ///     ShapeError: if the data has no dimension.
    fn noise(&self, py: Python<'_>, data: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let noised = compute(py, data.0.elem_count(), || self.objective.noise(&data.0))?;
        Ok((Tensor(noised.sample), Tensor(noised.sigmas), Tensor(noised.target)))
    }

    /// The noise levels of `steps` sampling steps: from 1 down to 0, `steps + 1` numbers.
    ///
    /// Raises:
    ///     ArgumentError: if there are no steps.
    fn sigmas(&self, steps: Integer) -> Result<Vec<f64>> {
        let steps = steps.count("sigmas", "steps")?;
        quick(|| sampler::flow_sigmas(steps, self.shift))
    }

    /// One step of Euler's method along a velocity.
    ///
    /// Args:
    ///     sample: where the path is at noise level `sigma`.
    ///     velocity: what the model says there, in the shape of `sample`.
    ///     sigma: the noise level.
    ///     next_sigma: the noise level to go to.
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
        sigma: Given<f64>,
        next_sigma: Given<f64>,
    ) -> Result<Tensor> {
        let (sigma, next_sigma) = (sigma.get("euler_step", "sigma")?, next_sigma.get("euler_step", "next_sigma")?);
        compute(py, sample.0.elem_count(), || sampler::euler_step(&sample.0, &velocity.0, sigma, next_sigma))
            .map(Tensor)
    }
}
