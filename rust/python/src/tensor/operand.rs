//! [`Operand`]: an argument that is a tensor, a number, a numpy array or a tensor of another library.

use numpy::PyUntypedArray;
use pyo3::exceptions::PyTypeError;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_union};
use trainable_candle_core as tc;

use super::{Tensor, to_raw};
use crate::error::Result;

/// An argument that may be a tensor, a number or an array, such as the second operand of `tensor + operand`.
pub enum Operand<'a> {
    /// A tensor.
    Tensor(&'a tc::Tensor),
    /// A Python or numpy number. It has no dtype of its own, and usually gets that of the other operand.
    Number(Number),
    /// A numpy array or a tensor of another library, with its own dtype.
    Array(tc::Tensor),
}

/// A number without a dtype.
#[derive(Clone, Copy)]
pub struct Number {
    /// The value; infinity with the integer's sign for an integer outside the range of f64.
    pub value: f64,
    /// The kind of number.
    pub kind: Kind,
}

/// The kind of a [`Number`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Float,
    /// An integer with its exact value.
    Integer(i64),
    /// An integer outside the range of i64.
    Huge,
}

impl Number {
    /// The integer `value`.
    pub const fn integer(value: i64) -> Self {
        Self { value: value as f64, kind: Kind::Integer(value) }
    }

    /// Reads the number in `object`, which is an integer if `is_integer`, otherwise a float.
    ///
    /// # Errors
    /// The exception of Python's conversion of `object` to a float.
    fn read(object: &Bound<'_, PyAny>, is_integer: bool) -> PyResult<Self> {
        if !is_integer {
            return Ok(Self { value: object.extract()?, kind: Kind::Float });
        }
        if let Ok(value) = object.extract() {
            return Ok(Self::integer(value));
        }
        // The integer is outside the range of i64. If the extraction as f64 fails, it is outside the range of f64 too.
        let limit = if object.lt(0).unwrap_or(false) { f64::NEG_INFINITY } else { f64::INFINITY };
        Ok(Self { value: object.extract().unwrap_or(limit), kind: Kind::Huge })
    }

    /// The number as text for error messages, which is short even if the number is very large.
    pub fn text(self) -> String {
        if let Kind::Integer(value) = self.kind { value.to_string() } else { format!("{:?}", self.value) }
    }

    /// Whether the number is an integer.
    pub fn is_integer(self) -> bool {
        self.kind != Kind::Float
    }

    /// The number as f64.
    ///
    /// # Errors
    /// [`tc::Error::Argument`] for an integer outside the range of f64.
    pub fn float(self, op: &'static str) -> tc::Result<f64> {
        if self.kind == Kind::Huge && self.value.is_infinite() {
            return Err(tc::Error::argument(op, "the integer is too large for a floating point number"));
        }
        Ok(self.value)
    }

    /// The number as an integer in the range of the integer dtype `dtype`.
    ///
    /// # Errors
    /// As [`to_tensor`](Self::to_tensor).
    fn integer_in(self, op: &'static str, dtype: tc::DType) -> tc::Result<i64> {
        let range = match dtype {
            tc::DType::U8 => 0..=i64::from(u8::MAX),
            tc::DType::U32 => 0..=i64::from(u32::MAX),
            _ => i64::MIN..=i64::MAX,
        };
        match self.kind {
            Kind::Integer(value) if range.contains(&value) => Ok(value),
            Kind::Float => Err(tc::Error::dtype(
                op,
                format!("{} cannot hold {}, which is a float; use a floating point dtype", dtype.as_str(), self.text()),
            )),
            _ => Err(tc::Error::argument(
                op,
                format!(
                    "the number {} does not fit into {}, which holds {} to {}",
                    self.text(),
                    dtype.as_str(),
                    range.start(),
                    range.end()
                ),
            )),
        }
    }

    /// A tensor without dimensions that has this value.
    ///
    /// # Errors
    /// [`tc::Error::DType`] if `dtype` is an integer dtype and the number a float, [`tc::Error::Argument`] if the
    /// number is an integer outside the range of an integer `dtype`, or of f64 if `dtype` is floating point.
    pub fn to_tensor(self, op: &'static str, dtype: tc::DType, device: &tc::Device) -> tc::Result<tc::Tensor> {
        if tc::raw::is_float(dtype) {
            return tc::Tensor::full(self.float(op)?, (), dtype, device);
        }
        let in_i64 = tc::Tensor::from(tc::raw::from_vec(vec![self.integer_in(op, dtype)?], ()));
        in_i64.to_dtype(dtype)?.to_device(device)
    }

    /// A tensor without dimensions that has this value, in the dtype and on the device of `like`.
    ///
    /// # Errors
    /// As [`to_tensor`](Self::to_tensor).
    pub fn like(self, op: &'static str, like: &tc::Tensor) -> tc::Result<tc::Tensor> {
        match like.dtype() {
            // A fast path: in operations on small tensors, the general conversion below would take most of the time.
            tc::DType::F32 if like.device().is_cpu() => Ok(tc::raw::from_vec(vec![self.float(op)? as f32], ()).into()),
            dtype => self.to_tensor(op, dtype, like.device()),
        }
    }
}

impl Operand<'_> {
    /// Call `apply` with the operand as a tensor. A number gets the dtype and the device of `other`. `op` is the name
    /// of the operation for error messages.
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

    /// Call `apply` with the operand as a tensor. A number becomes an f32 tensor on `device`; a tensor or an array
    /// keeps its dtype and its device.
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

    /// Any object that is no tensor, number or array is an error. Python then tries the operator of that object, and
    /// raises a `TypeError` if that operator fails too.
    #[inline]
    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        // The most frequent types come first. `cast_exact` accepts `Tensor` alone; `cast`, below, its subclass `Var`.
        if let Ok(tensor) = object.cast_exact::<Tensor>() {
            return Ok(Self::Tensor(&tensor.get().0));
        }
        if let Ok(number) = object.cast::<PyFloat>() {
            return Ok(Self::Number(Number { value: number.value(), kind: Kind::Float }));
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Ok(Self::Tensor(&tensor.get().0));
        }
        if let Ok(number) = object.cast::<PyInt>() {
            return Ok(Self::Number(Number::read(&number, /* is_integer */ true)?));
        }
        Ok(foreign(&object)?)
    }
}

/// Read an operand of a class that is not Python's or this library's.
///
/// # Errors
/// `TypeError` if `object` is no array or number; the errors of [`to_raw`].
#[cold]
fn foreign(object: &Bound<'_, PyAny>) -> Result<Operand<'static>> {
    if object.cast::<PyUntypedArray>().is_ok() || object.hasattr("__dlpack__")? {
        // `None`: the array keeps its dtype.
        return Ok(Operand::Array(to_raw("tensor", object, None)?.into()));
    }
    // For example a numpy scalar; only integers have `__index__`.
    if object.hasattr("__float__")? {
        return Ok(Operand::Number(Number::read(object, object.hasattr("__index__")?)?));
    }
    Err(PyTypeError::new_err("expected a Tensor, a number or a numpy array").into())
}
