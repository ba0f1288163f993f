//! The Python class `Var`, a trainable variable, and the method `make_var` of `Tensor`.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use crate::call::{catch_panics, compute};
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::tensor::{Tensor, from_data};

/// A trainable variable: a tensor with its own storage that accumulates a gradient and can be set to new values.
///
/// A `Var` is a `Tensor`. After the values of a `Var` have changed, a backward pass that needs the old values raises an
/// error instead of computing a wrong gradient.
///
/// ```python
/// v = tc.Var([1.0, 2.0, 3.0])
/// (v * v).sum().backward()
/// assert v.grad.tolist() == [2.0, 4.0, 6.0]
/// v.set(v.detach() - 0.1 * v.grad)
/// ```
///
/// Args:
///     data: a tensor or anything else that `tensor` takes. The values are copied and detached from the tape.
///     dtype: a floating point dtype; default: the dtype that `tensor` gives the data.
///     device: the device; default: the device of `data` if it is a tensor, otherwise the CPU.
///
/// Raises:
///     DTypeError: if the variable's dtype would not be floating point.
///     The other errors of `tensor`.
#[pyclass(frozen, extends = Tensor, module = "trainable_candle")]
pub struct Var(pub tc::Var);

impl Var {
    /// What makes the Python object of a variable: the value of the base class `Tensor`, then that of `Var`.
    fn initializer(var: tc::Var) -> PyClassInitializer<Self> {
        PyClassInitializer::from(Tensor(var.as_tensor().clone())).add_subclass(Self(var))
    }

    /// The Python object of a variable.
    pub fn object(py: Python<'_>, var: tc::Var) -> PyResult<Py<Self>> {
        Py::new(py, Self::initializer(var))
    }
}

#[pymethods]
impl Var {
    #[new]
    #[pyo3(signature = (data, dtype=None, device=None))]
    fn new(data: &Bound<'_, PyAny>, dtype: Option<DTypeArg>, device: Option<&str>) -> Result<PyClassInitializer<Self>> {
        let device = match (device, data.cast::<Tensor>()) {
            (Some(name), _) => device::parse(name)?,
            (None, Ok(tensor)) => tensor.get().0.device().clone(),
            (None, Err(_)) => tc::Device::Cpu,
        };
        let tensor = from_data(data, dtype.map(|dtype| dtype.0), &device)?;
        Ok(Self::initializer(catch_panics(|| tc::Var::from_tensor(&tensor))?))
    }

    /// The accumulated gradient, or None. Assigning a tensor replaces the gradient by a copy of the tensor; assigning
    /// None clears the gradient.
    ///
    /// Raises:
    ///     ShapeError, DTypeError, DeviceError: on assignment, if the tensor differs from the variable in shape, dtype
    ///         or device.
    ///     OutOfMemoryError: if a copy of the gradient does not fit in memory. Reading makes a copy only if the
    ///         gradient is in a flat buffer, which holds the gradients of several adapter parameters together.
    #[getter]
    fn grad(&self) -> Result<Option<Tensor>> {
        Ok(catch_panics(|| self.0.try_grad())?.map(Tensor))
    }

    #[setter]
    fn set_grad(&self, grad: Option<&Tensor>) -> Result<()> {
        catch_panics(|| grad.map_or_else(|| self.0.zero_grad(), |grad| self.0.set_grad(&grad.0)))
    }

    /// Record that a copy has taken the place of this variable, for example on another device. A step of an optimizer
    /// that still has this variable then raises an error.
    fn _replace(&self) {
        self.0.mark_replaced();
    }

    /// Clear the gradient.
    fn zero_grad(&self) -> Result<()> {
        catch_panics(|| self.0.zero_grad())
    }

    /// Overwrite the values of the variable in place.
    ///
    /// Raises:
    ///     ShapeError, DTypeError, DeviceError: if `value` differs from the variable in shape, dtype or device.
    fn set(&self, py: Python<'_>, value: &Tensor) -> Result<()> {
        compute(py, self.0.elem_count(), || self.0.set(&value.0))
    }
}

#[pymethods]
impl Tensor {
    /// Make a variable with a contiguous copy of this tensor's values, detached from the tape.
    ///
    /// Raises:
    ///     DTypeError: if the tensor is not floating point.
    fn make_var(&self, py: Python<'_>) -> Result<Py<Var>> {
        let var = compute(py, self.0.elem_count(), || tc::Var::from_tensor(&self.0))?;
        Ok(Var::object(py, var)?)
    }
}
