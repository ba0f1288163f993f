//! Loss scaling: the Python class `GradScaler`. Methods that may wait or compute for long release the GIL (`detached`).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_nn::optim::{self, GradScalerConfig};

use super::Optimizer;
use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::{catch_panics, detached};
use crate::error::Result;
use crate::tensor::Tensor;

const OP: &str = "GradScaler";

/// Scales the loss so that f16 gradients do not vanish, and skips steps whose gradients overflowed, as
/// `torch.amp.GradScaler` does.
///
/// An iteration calls `scaler.scale(loss).backward()`, then optionally `scaler.unscale_(optimizer)` and clipping, then
/// `scaler.step(optimizer)` and `scaler.update()`. If the loss is on a CUDA device, the first use of the scaler moves
/// the scale to the device, so use the scaler once before `tc.cuda.capture`.
///
/// ```python
/// scaler = tc.optim.GradScaler()
/// scaler.scale(loss).backward()
/// scaler.unscale_(optimizer)
/// tc.optim.clip_grad_norm_(model.parameters(), 1.0)
/// scaler.step(optimizer)
/// scaler.update()
/// optimizer.zero_grad()
/// ```
///
/// Args:
///     init_scale: the first scale, above 0.
///     growth_factor: the scale is multiplied by this after `growth_interval` steps in a row with finite gradients;
///         above 1.
///     backoff_factor: the scale is multiplied by this after a step with a non-finite gradient; in (0, 1).
///     growth_interval: the number of steps in a row with finite gradients after which the scale grows, at least 1.
///     enabled: if False, the scaler changes neither losses nor gradients and takes every step.
///
/// Raises:
///     ArgumentError: if a number is out of range.
#[pyclass(frozen, module = "trainable_candle.optim")]
pub struct GradScaler(Mutex<optim::GradScaler>);

impl GradScaler {
    fn lock(&self) -> MutexGuard<'_, optim::GradScaler> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl GradScaler {
    #[new]
    #[pyo3(signature = (init_scale=Argument::of(65536.0), growth_factor=Argument::of(2.0), backoff_factor=Argument::of(0.5), growth_interval=Integer::of(2000), enabled=true))]
    fn new(
        init_scale: Argument<f64>,
        growth_factor: Argument<f64>,
        backoff_factor: Argument<f64>,
        growth_interval: Integer,
        enabled: bool,
    ) -> Result<Self> {
        let config = GradScalerConfig {
            init_scale: init_scale.get(OP, "init_scale")?,
            growth_factor: growth_factor.get(OP, "growth_factor")?,
            backoff_factor: backoff_factor.get(OP, "backoff_factor")?,
            growth_interval: growth_interval.as_u64(OP, "growth_interval")?,
            enabled,
        };
        Ok(Self(Mutex::new(optim::GradScaler::new(config)?)))
    }

    /// Return the loss times the scale, or the loss itself if the scaler is not enabled.
    ///
    /// Raises:
    ///     DTypeError: if the loss is not floating point.
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        catch_panics(|| self.lock().scale(&loss.0)).map(Tensor)
    }

    /// Divide the gradients of the optimizer's variables by the scale, to clip or read the gradients before the step.
    ///
    /// Raises:
    ///     ArgumentError: if `unscale_` or `step` was already called for this optimizer since the last `update`.
    fn unscale_(&self, py: Python<'_>, optimizer: &Optimizer) -> Result<()> {
        detached(py, || self.lock().unscale(&**optimizer.lock()))
    }

    /// Let the optimizer take a step with the gradients divided by the scale. If a gradient is non-finite, skip the
    /// step.
    ///
    /// If `unscale_` has not divided the gradients, `step` divides them: on the CPU in place; on a CUDA device while
    /// the optimizer reads them, so that `grad` stays scaled.
    ///
    /// Returns:
    ///     Whether the step was taken, always True if the scaler is not enabled. An enabled scaler on a CUDA device
    ///     returns None, because the answer would need synchronization.
    ///
    /// Raises:
    ///     ArgumentError: if `step` was already called for this optimizer since the last `update`.
    ///     The errors of the optimizer's `step`.
    fn step(&self, py: Python<'_>, optimizer: &Optimizer) -> Result<Option<bool>> {
        detached(py, || self.lock().step(&mut **optimizer.lock()))
    }

    /// End the iteration: the scale falls if a gradient was non-finite, and grows after `growth_interval` steps in a
    /// row with finite gradients.
    ///
    /// Raises:
    ///     ArgumentError: if neither `unscale_` nor `step` was called since the last `update`.
    fn update(&self) -> Result<()> {
        catch_panics(|| self.lock().update())
    }

    /// Return the current scale; 1 if the scaler is not enabled. On a CUDA device, this method waits for the device's
    /// work.
    fn get_scale(&self, py: Python<'_>) -> Result<f64> {
        detached(py, || self.lock().get_scale())
    }

    /// Return a dict with the scale (`scale`) and the number of steps in a row with finite gradients since the scale
    /// last changed (`growth_tracker`). On a CUDA device, this method waits for the device's work.
    fn state_dict(&self, py: Python<'_>) -> Result<BTreeMap<&'static str, f64>> {
        detached(py, || {
            let scaler = self.lock();
            Ok(BTreeMap::from([("scale", scaler.get_scale()?), ("growth_tracker", scaler.growth_tracker()? as f64)]))
        })
    }

    /// Load `scale` and `growth_tracker` from a result of `state_dict`.
    ///
    /// Raises:
    ///     ConfigError: if an entry is missing.
    ///     ArgumentError: if `scale` is not a finite number above 0, or `growth_tracker` not an integer of at least 0.
    fn load_state_dict(&self, state: Argument<BTreeMap<String, f64>>) -> Result<()> {
        let state = state.get(OP, "state")?;
        let entry = |name: &str| {
            let missing = || tc::Error::Config(format!("GradScaler: the state has no entry \"{name}\""));
            state.get(name).copied().ok_or_else(missing)
        };
        let (scale, growth_tracker) = (entry("scale")?, entry("growth_tracker")?);
        if growth_tracker < 0.0 || growth_tracker.fract() != 0.0 {
            let message = format!("found growth_tracker {growth_tracker}, expected an integer of at least 0");
            return Err(tc::Error::argument(OP, message).into());
        }
        catch_panics(|| self.lock().restore(scale, growth_tracker as u64))
    }
}
