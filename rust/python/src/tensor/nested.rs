//! Reads Python numbers, and the numbers in nested Python lists and tuples.

use std::ops::RangeInclusive;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyTuple};
use tc::{DType, Raw};
use trainable_candle_core as tc;

use super::Tensor;
use crate::error::Result;

/// The greatest depth of nested lists. Without a limit, reading a list that contains itself would not end.
const MAX_DEPTH: usize = 32;

/// A Python number.
#[derive(Clone, Copy)]
enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Scalar {
    fn as_f64(self) -> f64 {
        match self {
            Self::Bool(value) => f64::from(u8::from(value)),
            Self::Int(value) => value as f64,
            Self::Float(value) => value,
        }
    }

    fn as_i64(self) -> i64 {
        match self {
            Self::Bool(value) => i64::from(value),
            Self::Int(value) => value,
            Self::Float(value) => value as i64,
        }
    }

    /// Whether `range` contains the number, rounded towards 0. No range contains NaN.
    fn is_within(self, range: &RangeInclusive<i64>) -> bool {
        // 2^63, the first float above the range of i64.
        const END: f64 = 9_223_372_036_854_775_808.0;
        let fits_i64 = match self {
            Self::Float(value) => (-END..END).contains(&value),
            Self::Bool(_) | Self::Int(_) => true,
        };
        fits_i64 && range.contains(&self.as_i64())
    }

    fn text(self) -> String {
        if let Self::Float(value) = self { format!("{value:?}") } else { self.as_i64().to_string() }
    }
}

/// Read a number, or the numbers in nested lists or tuples, and convert them to `dtype`. Without `dtype`, the result is
/// f32 if any number is a float or there are no numbers, u8 if all numbers are bools, and i64 otherwise. Returns `None`
/// if `data` is or contains an array with dimensions. `op` is the name of the operation for errors.
///
/// Conversions of floats to an integer dtype round towards 0.
///
/// # Errors
/// `ShapeError` if the lists are ragged or deeper than [`MAX_DEPTH`], `DTypeError` if an element is not a number,
/// `ArgumentError` if an element is a [`Tensor`] or an integer outside the range of i64, or if `dtype` is an integer
/// dtype and a number is NaN or outside the range of `dtype`.
pub fn read(op: &'static str, data: &Bound<'_, PyAny>, dtype: Option<DType>) -> Result<Option<Raw>> {
    let mut nested = Nested { op, dims: Vec::new(), values: Vec::new() };
    match nested.visit(data, 0) {
        Ok(()) => {}
        Err(Refusal::Array) => return Ok(None),
        Err(Refusal::Error(error)) => return Err(error),
    }
    let Nested { dims, values, .. } = nested;
    let inferred = if values.is_empty() || values.iter().any(|v| matches!(v, Scalar::Float(_))) {
        DType::F32
    } else if values.iter().all(|v| matches!(v, Scalar::Bool(_))) {
        DType::U8
    } else {
        DType::I64
    };
    let dtype = dtype.unwrap_or(inferred);
    let range = match dtype {
        DType::U8 => Some(0..=i64::from(u8::MAX)),
        DType::U32 => Some(0..=i64::from(u32::MAX)),
        DType::I64 => Some(i64::MIN..=i64::MAX),
        _ => None,
    };
    if let Some(outside) = range.and_then(|range| values.iter().find(|v| !v.is_within(&range))) {
        let message = format!("{} is outside the range of {}", outside.text(), dtype.as_str());
        return Err(tc::Error::argument(op, message).into());
    }
    let raw = match dtype {
        DType::I64 => tc::raw::from_vec(values.iter().map(|v| v.as_i64()).collect(), dims),
        DType::U32 => tc::raw::from_vec(values.iter().map(|v| v.as_i64() as u32).collect(), dims),
        DType::U8 => tc::raw::from_vec(values.iter().map(|v| v.as_i64() as u8).collect(), dims),
        DType::F64 => tc::raw::from_vec(values.iter().map(|v| v.as_f64()).collect(), dims),
        // f32, and f16 and bf16 by way of f32.
        _ => {
            let raw = tc::raw::from_vec(values.iter().map(|v| v.as_f64() as f32).collect(), dims);
            if dtype == DType::F32 { raw } else { raw.to_dtype(dtype).map_err(tc::Error::from)? }
        }
    };
    Ok(Some(raw))
}

/// The reason why [`Nested`] cannot read an object.
enum Refusal {
    /// An element is an array with dimensions. (An array without dimensions is a number.)
    Array,
    Error(crate::error::Error),
}

impl<E: Into<crate::error::Error>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// The lists read so far: their shape, and their numbers in row-major order.
struct Nested {
    op: &'static str,
    dims: Vec<usize>,
    values: Vec<Scalar>,
}

impl Nested {
    /// Read the numbers of `object`, which is inside `depth` lists.
    fn visit(&mut self, object: &Bound<'_, PyAny>, depth: usize) -> std::result::Result<(), Refusal> {
        if let Ok(list) = object.cast::<PyList>() {
            self.enter(list.len(), depth)?;
            return list.iter().try_for_each(|item| self.visit(&item, depth + 1));
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            self.enter(tuple.len(), depth)?;
            return tuple.iter().try_for_each(|item| self.visit(&item, depth + 1));
        }
        let value = self.scalar(object)?;
        if self.dims.len() != depth {
            return Err(self.ragged(depth, "a number"));
        }
        self.values.push(value);
        Ok(())
    }

    /// Begin a list of `length` items inside `depth` other lists. The first list at each depth determines the size of
    /// that dimension; all others must have the same length.
    fn enter(&mut self, length: usize, depth: usize) -> std::result::Result<(), Refusal> {
        if depth >= MAX_DEPTH {
            return Err(tc::Error::shape(self.op, format!("lists are nested deeper than {MAX_DEPTH}")).into());
        }
        match self.dims.get(depth) {
            Some(&expected) if expected == length => Ok(()),
            // After the first number, the number of dimensions is known, and no list may add one.
            None if self.values.is_empty() && self.dims.len() == depth => {
                self.dims.push(length);
                Ok(())
            }
            _ => Err(self.ragged(depth, &format!("a sequence of {length}"))),
        }
    }

    /// The error about an object, described by `found`, that does not fit the lists before it.
    fn ragged(&self, depth: usize, found: &str) -> Refusal {
        let expected = self.dims.get(depth).map_or_else(|| "a number".to_owned(), |n| format!("a sequence of {n}"));
        tc::Error::shape(
            self.op,
            format!("nested lists are ragged: found {found} at depth {depth}, expected {expected}"),
        )
        .into()
    }

    /// The number that `object` is.
    fn scalar(&self, object: &Bound<'_, PyAny>) -> std::result::Result<Scalar, Refusal> {
        if let Ok(value) = object.cast::<PyFloat>() {
            return Ok(Scalar::Float(value.value()));
        }
        if let Ok(value) = object.cast::<PyBool>() {
            return Ok(Scalar::Bool(value.is_true()));
        }
        if object.is_instance_of::<PyInt>() {
            return self.integer(object);
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Err(tc::Error::argument(
                self.op,
                format!(
                    "found a Tensor of shape {:?} in a list; join tensors with stack() or cat()",
                    tensor.get().0.dims()
                ),
            )
            .into());
        }
        if object.hasattr("__array__")? {
            if object.getattr("ndim")?.extract::<usize>()? > 0 {
                return Err(Refusal::Array);
            }
            // numpy's bools are not instances of Python's bool.
            let kind = object.getattr("dtype").and_then(|dtype| dtype.getattr("kind"));
            if kind.and_then(|kind| kind.eq("b")).unwrap_or(false) {
                return Ok(Scalar::Bool(object.is_truthy()?));
            }
        }
        if object.hasattr("__index__")? {
            return self.integer(object);
        }
        if object.hasattr("__float__")? {
            return Ok(Scalar::Float(object.extract()?));
        }
        let found = object.get_type().name()?;
        Err(tc::Error::dtype(
            self.op,
            format!("cannot make a tensor of {found}; expected numbers, nested lists of them, or an array"),
        )
        .into())
    }

    /// The integer to which Python converts `object`.
    fn integer(&self, object: &Bound<'_, PyAny>) -> std::result::Result<Scalar, Refusal> {
        match object.extract::<i64>() {
            Ok(value) => Ok(Scalar::Int(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Err(tc::Error::argument(self.op, format!("{object} is outside the range of i64")).into())
            }
            Err(error) => Err(error.into()),
        }
    }
}
