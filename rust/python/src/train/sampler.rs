//! Python's `Sampler` of diffusion models, and classifier-free guidance.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use trainable_candle_train::sampler::{self, SamplerKind};

use super::NoiseSchedule;
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, compute};
use crate::error::Result;
use crate::tensor::Tensor;

/// One sampling run of a diffusion model, from noise to data.
///
/// ```python
/// sampler = tc.train.Sampler(tc.train.NoiseSchedule(), 10, "dpmpp_2m")
/// x = sampler.init_noise(tc.randn(1, 4, 8, 8))
/// for i, timestep in enumerate(sampler.timesteps):
///     output = tc.zeros(1, 4, 8, 8)  # a model computes it from sampler.scale_input(x, i) and timestep
///     x = sampler.step(output, i, x)
/// ```
///
/// Args:
///     schedule: the noise schedule of the model's training.
///     steps: the number of sampling steps, at least 1.
///     kind: "euler" (diffusers' EulerDiscreteScheduler) or "dpmpp_2m" (DPM-Solver++ of second order, arXiv:2211.01095;
///         diffusers' DPMSolverMultistepScheduler).
///     karras_sigmas: whether the noise levels `sigmas` are spaced as in arXiv:2206.00364, equation 5.
///
/// Raises:
///     ArgumentError: if the kind is unknown, or if there are no steps or too many: "euler" takes at most as many steps
///         as the schedule has timesteps, "dpmpp_2m" one fewer.
#[pyclass(frozen, module = "trainable_candle.train")]
pub struct Sampler(Mutex<Box<dyn sampler::Sampler>>);

impl Sampler {
    /// The locked sampler. It remains usable after a panic in an earlier call.
    fn lock(&self) -> MutexGuard<'_, Box<dyn sampler::Sampler>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (schedule, steps, kind="euler", karras_sigmas=false))]
    fn new(schedule: &NoiseSchedule, steps: Integer, kind: &str, karras_sigmas: bool) -> Result<Self> {
        let steps = steps.count("Sampler", "steps")?;
        let kind: SamplerKind = kind.parse()?;
        Ok(Self(Mutex::new(catch_panics(|| kind.start(&schedule.0, steps, karras_sigmas))?)))
    }

    /// The timestep that the model receives at each step.
    #[getter]
    fn timesteps(&self) -> Vec<f64> {
        self.lock().timesteps().to_vec()
    }

    /// The noise-to-data ratio of the sample at each step, followed by 0 for the finished sample.
    #[getter]
    fn sigmas(&self) -> Vec<f64> {
        self.lock().sigmas().to_vec()
    }

    /// Scale standard normal noise to the sample at step 0, in f32 (f64 for f64 noise).
    ///
    /// Args:
    ///     noise: standard normal values.
    fn init_noise(&self, py: Python<'_>, noise: &Tensor) -> Result<Tensor> {
        // `compute` releases the GIL if the operation is over many elements.
        compute(py, noise.0.elem_count(), || self.lock().init_noise(&noise.0)).map(Tensor)
    }

    /// Scale the sample at step `i` to the model's input.
    ///
    /// Args:
    ///     x: the sample at step `i`.
    ///     i: the step, from 0.
    ///
    /// Raises:
    ///     ArgumentError: if there is no step `i`.
    fn scale_input(&self, py: Python<'_>, x: &Tensor, i: Integer) -> Result<Tensor> {
        let i = i.count("scale_input", "i")?;
        compute(py, x.0.elem_count(), || self.lock().scale_input(&x.0, i)).map(Tensor)
    }

    /// Compute the sample at the next noise level. Call this function for all steps in order; step 0 starts a new run.
    ///
    /// Args:
    ///     model_output: the model's output for `scale_input(x, i)` at the timestep `timesteps[i]`.
    ///     i: the step, from 0.
    ///     x: the sample at step `i`.
    ///
    /// Returns:
    ///     The sample at step `i + 1`, f32 (f64 for f64 samples).
    ///
    /// Raises:
    ///     ArgumentError: if there is no step `i`, or, for "dpmpp_2m", if `i` is neither 0 nor the step after the
    ///         previous call's step.
    ///     ShapeError: if `model_output` does not have the shape of `x`.
    fn step(&self, py: Python<'_>, model_output: &Tensor, i: Integer, x: &Tensor) -> Result<Tensor> {
        let i = i.count("step", "i")?;
        compute(py, x.0.elem_count(), || self.lock().step(&model_output.0, i, &x.0)).map(Tensor)
    }
}

/// Apply classifier-free guidance (arXiv:2207.12598): move a model's output for the prompt away from its output for a
/// negative prompt.
///
/// ```python
/// negative, positive = tc.zeros(2), tc.ones(2)
/// assert tc.train.classifier_free_guidance(negative, positive, 7.0).tolist() == [7.0, 7.0]
/// ```
///
/// Args:
///     negative: the model's output for the negative prompt.
///     positive: the model's output for the prompt.
///     scale: the guidance scale; a scale of 1 gives `positive`, up to rounding.
///
/// Returns:
///     `negative + scale * (positive - negative)`.
///
/// Raises:
///     ShapeError: if the shapes of the two outputs do not broadcast.
///     DTypeError, DeviceError: if the two outputs have different dtypes, or are on different devices.
#[pyfunction]
pub fn classifier_free_guidance(
    py: Python<'_>,
    negative: &Tensor,
    positive: &Tensor,
    scale: Argument<f64>,
) -> Result<Tensor> {
    let scale = scale.get("classifier_free_guidance", "scale")?;
    let work = || sampler::classifier_free_guidance(&negative.0, &positive.0, scale);
    compute(py, negative.0.elem_count(), work).map(Tensor)
}
