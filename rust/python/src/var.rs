//! The class `Var`.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use crate::call::{compute, quick};
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;
use crate::tensor::{Tensor, from_data};

/// A trainable variable: a tensor with its own storage, whose values can be set and which accumulates a gradient.
///
/// A `Var` is a `Tensor`. After a change of its values, tensors that were computed from it before are stale: a backward
/// pass through them raises an error instead of computing a wrong gradient.
///
/// ```python
/// v = tc.Var([1.0, 2.0, 3.0])
/// (v * v).sum().backward()
/// assert v.grad.tolist() == [2.0, 4.0, 6.0]
/// v.set(v.detach() - 0.1 * v.grad)
/// ```
///
/// Args:
///     data: a tensor, whose values are copied and detached from the graph, or anything that `tensor` takes.
///     dtype: a floating point dtype; default: the data's.
///     device: the device; default: the data's.
///
/// Raises:
///     DTypeError: if the values are not floating point.
#[pyclass(frozen, extends = Tensor, module = "trainable_candle")]
pub struct Var(pub tc::Var);

impl Var {
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
        Ok(Self::initializer(quick(|| tc::Var::from_tensor(&tensor))?))
    }

    /// The accumulated gradient, or None. Assigning a tensor replaces the gradient; assigning None clears it.
    ///
    /// Raises:
    ///     ShapeError, DTypeError: on assignment, if the gradient differs from the variable in shape or dtype.
    ///     OutOfMemoryError: if a copy of a gradient in an adapter's flat buffer does not fit.
    #[getter]
    fn grad(&self) -> Result<Option<Tensor>> {
        Ok(quick(|| self.0.try_grad())?.map(Tensor))
    }

    #[setter]
    fn set_grad(&self, grad: Option<&Tensor>) -> Result<()> {
        quick(|| grad.map_or_else(|| self.0.zero_grad(), |grad| self.0.set_grad(&grad.0)))
    }

    /// Note that a copy has taken the place of this variable; a step of an optimizer that still has it raises.
    fn _replace(&self) {
        self.0.replace();
    }

    /// Clear the gradient.
    fn zero_grad(&self) -> Result<()> {
        quick(|| self.0.zero_grad())
    }

    /// Overwrite the value in place.
    ///
    /// Raises:
    ///     ShapeError, DTypeError, DeviceError: if `value` differs from the variable in shape, dtype or device.
    fn set(&self, py: Python<'_>, value: &Tensor) -> Result<()> {
        compute(py, self.0.elem_count(), || self.0.set(&value.0))
    }
}

#[pymethods]
impl Tensor {
    /// Make a variable with a contiguous copy of the values, detached from the graph.
    ///
    /// Raises:
    ///     DTypeError: if the values are not floating point.
    fn make_var(&self, py: Python<'_>) -> Result<Py<Var>> {
        let var = compute(py, self.0.elem_count(), || tc::Var::from_tensor(&self.0))?;
        Ok(Var::object(py, var)?)
    }
}
