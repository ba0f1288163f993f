//! The other side of an operator: a tensor, a number, or a numpy array.

use numpy::PyUntypedArray;
use pyo3::exceptions::PyTypeError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_union};
use trainable_candle_core as tc;

use super::{Tensor, to_raw};
use crate::error::Result;

/// What an operator takes besides its tensor.
pub enum Operand<'a> {
    /// A tensor.
    Tensor(&'a tc::Tensor),
    /// A Python or numpy number; it adopts the tensor's dtype.
    Number(Number),
    /// A numpy array, with its own dtype.
    Array(tc::Tensor),
}

/// A number without a dtype.
#[derive(Clone, Copy)]
pub struct Number {
    pub value: f64,
    pub is_integer: bool,
}

impl Number {
    /// A tensor of this value without dimensions, of the dtype and on the device of `like`.
    ///
    /// # Errors
    /// [`tc::Error::DType`] if a fraction meets an integer tensor.
    pub fn like(self, op: &'static str, like: &tc::Tensor) -> tc::Result<tc::Tensor> {
        if !self.is_integer && !tc::raw::is_float(like.dtype()) {
            return Err(tc::Error::dtype(
                op,
                format!(
                    "the tensor is {}, the number {} is not an integer; convert the tensor with to()",
                    like.dtype().as_str(),
                    self.value
                ),
            ));
        }
        match like.dtype() {
            // A number in an operation on small tensors is most of its cost.
            tc::DType::F32 if like.device().is_cpu() => Ok(tc::raw::from_vec(vec![self.value as f32], ()).into()),
            dtype => tc::Tensor::full(self.value, (), dtype, like.device()),
        }
    }
}

impl Operand<'_> {
    /// The operand as a tensor that can meet `other` in `op`.
    pub fn with<T>(
        &self,
        op: &'static str,
        other: &tc::Tensor,
        apply: impl FnOnce(&tc::Tensor) -> tc::Result<T>,
    ) -> tc::Result<T> {
        match self {
            Self::Tensor(tensor) => apply(tensor),
            Self::Array(tensor) => apply(tensor),
            Self::Number(number) => apply(&number.like(op, other)?),
        }
    }

    /// The operand as a tensor; a number becomes f32.
    pub fn in_f32<T>(&self, device: &tc::Device, apply: impl FnOnce(&tc::Tensor) -> tc::Result<T>) -> tc::Result<T> {
        match self {
            Self::Tensor(tensor) => apply(tensor),
            Self::Array(tensor) => apply(tensor),
            Self::Number(number) => apply(&tc::Tensor::full(number.value, (), tc::DType::F32, device)?),
        }
    }

    /// The number of elements, as a measure of work.
    pub fn elem_count(&self) -> usize {
        match self {
            Self::Tensor(tensor) => tensor.elem_count(),
            Self::Array(tensor) => tensor.elem_count(),
            Self::Number(_) => 1,
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Operand<'a> {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(
        Tensor::TYPE_HINT,
        type_hint_identifier!("builtins", "float"),
        type_hint_identifier!("builtins", "int")
    );

    /// Fails for anything else: Python then asks the other object, and raises its own `TypeError` in the end.
    #[inline]
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(tensor) = object.cast_exact::<Tensor>() {
            return Ok(Self::Tensor(&tensor.get().0));
        }
        if let Ok(number) = object.cast::<PyFloat>() {
            return Ok(Self::Number(Number { value: number.value(), is_integer: false }));
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Ok(Self::Tensor(&tensor.get().0));
        }
        if let Ok(number) = object.cast::<PyInt>() {
            return Ok(Self::Number(Number { value: number.extract()?, is_integer: true }));
        }
        Ok(foreign(&object)?)
    }
}

#[cold]
fn foreign(object: &Bound<'_, PyAny>) -> Result<Operand<'static>> {
    if object.cast::<PyUntypedArray>().is_ok() {
        return Ok(Operand::Array(to_raw("tensor", object, None)?.into()));
    }
    if object.hasattr("__float__")? {
        let is_integer = object.hasattr("__index__")?;
        return Ok(Operand::Number(Number { value: object.extract()?, is_integer }));
    }
    Err(PyTypeError::new_err("expected a Tensor, a number or a numpy array").into())
}
