//! The exponential moving average of an adapter's parameters.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::PyTypeInfo;
use pyo3::exceptions::PyTypeError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use trainable_candle_nn::optim::{self, EMAConfig, StateDict};

use crate::adapter_set::AdapterSet;
use crate::argument::Argument;
use crate::call::{catch_panics, detached};
use crate::error::Result;
use crate::named::NamedTensors;
use crate::tensor::Tensor;

/// The exponential moving average of an adapter's parameters. Call `update` after each step of the optimizer. Inside
/// `with ema:` the adapter computes with the averages, and saving the adapter writes the averages.
///
/// ```python
/// unet = tc.models.load("sdxl")
/// adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules="all-attention"))
/// ema = tc.optim.EMA(adapter, decay=0.99)
/// ema.update()  # after each step of the optimizer
/// with ema:
///     adapter.save("averaged.safetensors")
/// ```
///
/// Args:
///     adapter: the adapter, from `add_adapter` or `load_adapter`.
///     decay: the weight of the old average in each update, in [0, 1).
///     warmup: whether the update that follows n other updates uses min(decay, (1 + n) / (10 + n)) instead of `decay`,
///         so that the initial values soon lose their weight.
///
/// Raises:
///     ArgumentError: if `decay` is out of range.
///     DTypeError: if the parameters are not f32.
///     OutOfMemoryError: if the averages do not fit.
#[pyclass(frozen, module = "trainable_candle.optim")]
#[allow(clippy::upper_case_acronyms)] // the usual name of the average
pub struct EMA(Mutex<optim::EMA>);

/// The adapter whose parameters are averaged: the argument `adapter`.
struct Averaged<'a, 'py>(Borrowed<'a, 'py, AdapterSet>);

impl<'a, 'py> FromPyObject<'a, 'py> for Averaged<'a, 'py> {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = AdapterSet::TYPE_HINT;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.cast::<AdapterSet>().map(Self).map_err(|_| {
            let kind = object.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string());
            PyTypeError::new_err(format!(
                "found a {kind}, expected the adapter from add_adapter or load_adapter; for other variables use \
                 optim.VariableEMA"
            ))
        })
    }
}

impl EMA {
    fn lock(&self) -> MutexGuard<'_, optim::EMA> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl EMA {
    #[new]
    #[pyo3(signature = (adapter, decay=Argument::of(0.999), warmup=true))]
    fn new(adapter: Averaged<'_, '_>, decay: Argument<f64>, warmup: bool) -> Result<Self> {
        // `buffer` has the adapter's parameters as one flat vector.
        let config = EMAConfig { decay: decay.get("EMA", "decay")?, warmup };
        Ok(Self(Mutex::new(catch_panics(|| optim::EMA::new(adapter.0.get().inner().buffer(), config))?)))
    }

    /// Set each average to d · average + (1 - d) · parameter, where d is the property `decay` before the call.
    ///
    /// Raises:
    ///     ArgumentError: if the averages replace the parameters, as inside `with ema:`.
    ///     DeviceError: if a captured function updates twice.
    fn update(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().update())
    }

    /// Replace the adapter's parameters by the averages.
    ///
    /// Raises:
    ///     ArgumentError: if the averages already replace the parameters.
    ///     OutOfMemoryError: if a copy of the parameters does not fit.
    ///     DeviceError: inside a captured function.
    fn swap_in(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().swap_in())
    }

    /// Restore the adapter's own parameters, bit for bit.
    ///
    /// Raises:
    ///     ArgumentError: if the averages do not replace the parameters.
    ///     DeviceError: inside a captured function.
    fn swap_out(&self, py: Python<'_>) -> Result<()> {
        detached(py, || self.lock().swap_out())
    }

    fn __enter__<'py>(slf: PyRef<'py, Self>, py: Python<'py>) -> Result<PyRef<'py, Self>> {
        slf.swap_in(py)?;
        Ok(slf)
    }

    #[pyo3(signature = (*exception: "object"))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, pyo3::types::PyTuple>) -> Result<()> {
        // An exception that ended the `with` block propagates, because this method returns None.
        let _ = exception;
        self.swap_out(py)
    }

    /// Whether the averages currently replace the adapter's parameters.
    #[getter]
    fn is_swapped_in(&self) -> bool {
        self.lock().is_swapped_in()
    }

    /// The weight of the old average in the next update.
    #[getter]
    fn decay(&self) -> f64 {
        self.lock().decay()
    }

    /// The number of calls of `update`.
    #[getter]
    fn updates(&self) -> u64 {
        self.lock().updates()
    }

    /// Return a copy of the state on the CPU: `INDEX.average` is the average of the parameter with the index INDEX in
    /// `adapter.parameters()`, and `updates` (i64) is the number of updates.
    fn state_dict<'py>(&self, py: Python<'py>) -> Result<NamedTensors<'py>> {
        NamedTensors::new(py, detached(py, || self.lock().state_dict())?)
    }

    /// Load a state that was saved for an adapter with the same shapes. After each of the following errors, nothing has
    /// changed.
    ///
    /// Raises:
    ///     ConfigError: if an entry is missing or not expected, or the number of updates is negative.
    ///     ShapeError, DTypeError: if an entry has another shape or dtype.
    ///     DeviceError: inside a captured function.
    fn load_state_dict(&self, py: Python<'_>, state: HashMap<String, PyRef<'_, Tensor>>) -> Result<()> {
        let states: StateDict = state.into_iter().map(|(name, tensor)| (name, tensor.0.clone())).collect();
        detached(py, || self.lock().load_state_dict(&states))
    }

    fn __repr__(&self) -> String {
        let ema = self.lock();
        format!("EMA(decay={}, {} updates)", ema.config().decay, ema.updates())
    }
}
