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

/// Holds the Python function during a call of [`CapturedFunction`]. Between calls the slot is empty, because Python's
/// garbage collector cannot see what the slot holds. The collector finds a reference cycle through the function only if
/// it knows all references to the function from this object, and `__traverse__` shows it only the field `function`.
type Slot = Arc<Mutex<Option<Py<PyAny>>>>;

/// A function of tensors that returns a list of tensors. After its first calls, it is recorded as a CUDA graph, which
/// later calls replay.
#[pyclass(module = "trainable_candle._core")]
pub struct CapturedFunction {
    /// None after the garbage collector has cleared this object.
    function: Option<Py<PyAny>>,
    slot: Slot,
    captured: Mutex<Captured>,
}

/// Run the function in `slot` on `inputs`. If the slot is empty, as in a call of a [`CapturedFunction`] that the
/// garbage collector has cleared, return no tensors.
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
                // A captured function must not keep a tensor that it has created, unless it returns the tensor. So the
                // garbage collector frees the tensors in unreachable reference cycles that the function has made.
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
    /// Prepare a function. It is not called yet.
    ///
    /// Args:
    ///     function: a function that takes as many tensors as `static_inputs` has, and returns a list of tensors.
    ///     static_inputs: tensors with the shapes and dtypes that the inputs of every call must have. The graph runs on
    ///         the first CUDA device of these tensors, or on "cuda" if all are on the CPU.
    ///
    /// Raises:
    ///     CudaUnavailableError: if CUDA cannot be used.
    ///     DeviceError: if the GPU cannot run graphs, or this thread is recording a function.
    ///     AutogradError: if one of `static_inputs` needs a gradient.
    ///     OutOfMemoryError: if copies of the inputs do not fit into memory.
    #[new]
    fn new(py: Python<'_>, function: Function, static_inputs: Vec<PyRef<'_, Tensor>>) -> Result<Self> {
        let inputs: Vec<tc::Tensor> = static_inputs.iter().map(|tensor| tensor.0.clone()).collect();
        let input_device = inputs.iter().map(tc::Tensor::device).find(|device| device.is_cuda()).cloned();
        let device = input_device.map_or_else(|| device::parse("cuda"), Ok)?;
        let slot = Slot::default();
        let run: tc::capture::Function = Box::new({
            let slot = slot.clone();
            move |inputs| call(&slot, inputs)
        });
        let captured = detached(py, || Captured::new(&device, run, &inputs.iter().collect::<Vec<_>>()))?;
        Ok(Self { function: Some(function.into()), slot, captured: Mutex::new(captured) })
    }

    /// Call the function, record it or replay its graph, and return the results for `inputs`.
    ///
    /// Raises:
    ///     ArgumentError: if there are more or fewer inputs than `static_inputs`.
    ///     ShapeError, DTypeError: if an input has another shape or dtype than in `static_inputs`.
    ///     DeviceError: if the function does something that graphs do not support, such as reading a value, if it
    ///         returns a tensor on the CPU, or if another call of this object has not returned yet.
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
            let set_slot = |function| *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = function;
            set_slot(function);
            let outputs = captured.call(&inputs.iter().collect::<Vec<_>>());
            set_slot(None);
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
