//! Functions that run as CUDA graphs.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use tc::capture::Captured;
use trainable_candle_core as tc;

use crate::autograd::Function;
use crate::call::detached;
use crate::device;
use crate::error::{Error, Result, from_callback};
use crate::tensor::Tensor;

/// Holds the Python function during a call. Between calls the slot is empty, and only [`CapturedFunction`] refers to
/// the function, so that Python's garbage collector finds reference cycles through the function.
type Slot = Arc<Mutex<Option<Py<PyAny>>>>;

/// A function of tensors that returns a list of tensors. After its first calls, it is recorded as a CUDA graph, which
/// later calls replay.
#[pyclass(module = "trainable_candle._core")]
pub struct CapturedFunction {
    function: Option<Py<PyAny>>,
    slot: Slot,
    captured: Mutex<Captured>,
}

/// Run the function in `slot` on tensors. If the slot is empty, return no tensors.
fn call(slot: &Slot, inputs: &[tc::Tensor]) -> tc::Result<Vec<tc::Tensor>> {
    Python::attach(|py| {
        let function = {
            let slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.as_ref().map(|function| Function::from(function.clone_ref(py)))
        };
        let Some(function) = function else { return Ok(Vec::new()) };
        let run = || -> PyResult<Vec<tc::Tensor>> {
            let returned = function.call(py, inputs)?;
            let tensors = returned.extract::<Vec<PyRef<'_, Tensor>>>()?;
            let tensors = tensors.iter().map(|tensor| tensor.0.clone()).collect();
            if tc::capture::is_capturing() {
                // A captured function may keep no tensor that it has created, except its results. So the garbage
                // collector must free the tensors in unreachable reference cycles that the function has left.
                drop(returned);
                py.import("gc")?.call_method0("collect")?;
            }
            Ok(tensors)
        };
        run().map_err(from_callback)
    })
}

#[pymethods]
impl CapturedFunction {
    /// Args:
    ///     function: a function that takes as many tensors as `static_inputs` has, and returns a list of tensors.
    ///     static_inputs: tensors with the shapes and dtypes that the inputs of every call must have.
    ///
    /// Raises:
    ///     CudaUnavailableError: if CUDA cannot be used.
    ///     DeviceError: if the GPU cannot run graphs, or another captured function is running.
    ///     AutogradError: if an input needs a gradient.
    ///     OutOfMemoryError: if copies of the inputs do not fit into memory.
    #[new]
    fn new(py: Python<'_>, function: Function, static_inputs: Vec<PyRef<'_, Tensor>>) -> Result<Self> {
        let inputs: Vec<tc::Tensor> = static_inputs.iter().map(|tensor| tensor.0.clone()).collect();
        let on_device = inputs.iter().map(tc::Tensor::device).find(|device| device.is_cuda()).cloned();
        let device = on_device.map_or_else(|| device::parse("cuda"), Ok)?;
        let slot = Slot::default();
        let run: tc::capture::Function = Box::new({
            let slot = slot.clone();
            move |inputs| call(&slot, inputs)
        });
        let captured = detached(py, || Captured::new(&device, run, &inputs.iter().collect::<Vec<_>>()))?;
        Ok(Self { function: Some(function.into()), slot, captured: Mutex::new(captured) })
    }

    /// Call the function, or replay its graph; return the results for `inputs`.
    ///
    /// Raises:
    ///     ArgumentError: if the number of inputs is another than in `static_inputs`.
    ///     ShapeError, DTypeError: if an input has another shape or dtype than in `static_inputs`.
    ///     DeviceError: if the function does something that graphs do not support, such as reading a value.
    ///     The exceptions of the function.
    fn __call__(&self, py: Python<'_>, inputs: Vec<PyRef<'_, Tensor>>) -> Result<Vec<Tensor>> {
        let inputs: Vec<tc::Tensor> = inputs.iter().map(|tensor| tensor.0.clone()).collect();
        let function = self.function.as_ref().map(|function| function.clone_ref(py));
        let run = || {
            let mut captured = match self.captured.try_lock() {
                Ok(captured) => captured,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    return Err(tc::Error::device(
                        "capture",
                        "the captured function was called while it was running; call it again after it has returned",
                    ));
                }
            };
            let set = |function| *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = function;
            set(function);
            let outputs = captured.call(&inputs.iter().collect::<Vec<_>>());
            set(None);
            outputs
        };
        let outputs: std::result::Result<_, Error> = detached(py, run);
        Ok(outputs?.into_iter().map(Tensor).collect())
    }

    /// Whether the function has been recorded, so that calls replay its graph.
    #[getter]
    fn is_recorded(&self, py: Python<'_>) -> bool {
        py.detach(|| self.captured.lock().unwrap_or_else(PoisonError::into_inner).is_recorded())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        self.function.as_ref().map_or(Ok(()), |function| visit.call(function))
    }

    fn __clear__(&mut self) {
        self.function = None;
    }
}
