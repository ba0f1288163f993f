//! Values between Python and tensors: numpy arrays, nested lists, numbers.

use half::f16;
use numpy::prelude::*;
use numpy::{Element as NumpyElement, PyArray1, PyUntypedArray};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyTuple};
use tc::{DType, Raw};
use trainable_candle_core as tc;

use super::Tensor;
use super::source::{Element, Source};
use crate::dlpack;
use crate::error::Result;
use crate::types::NdArray;

/// How deep lists may be nested; a list that contains itself ends here.
const MAX_DEPTH: usize = 32;

/// The values of any Python object that holds numbers, as CPU storage of their own.
///
/// # Errors
/// `DTypeError` if they are no numbers, `ShapeError` if nested lists are ragged.
pub fn to_raw(op: &'static str, data: &Bound<'_, PyAny>, dtype: Option<DType>) -> Result<Raw> {
    let raw = if let Ok(tensor) = data.cast::<Tensor>() {
        tc::raw::own_copy(tensor.get().0.raw())?
    } else if let Ok(array) = data.cast::<PyUntypedArray>() {
        from_numpy(op, array)?
    } else if data.is_instance_of::<PyList>() || data.is_instance_of::<PyTuple>() || is_number(data)? {
        return from_nested(op, data, dtype);
    } else if data.hasattr("__dlpack__")? {
        dlpack::import(data)?
    } else {
        from_array_like(op, data)?
    };
    match dtype {
        Some(dtype) if dtype != raw.dtype() => Ok(raw.to_dtype(dtype).map_err(tc::Error::from)?),
        _ => Ok(raw),
    }
}

fn is_number(data: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(data.is_instance_of::<PyFloat>()
        || data.is_instance_of::<PyInt>()
        || (data.hasattr("__float__")? && !data.hasattr("__array__")?))
}

/// Whatever numpy can read: `__array__`, the buffer protocol, sequences.
fn from_array_like(op: &'static str, data: &Bound<'_, PyAny>) -> Result<Raw> {
    let array = data.py().import("numpy")?.call_method1("asarray", (data,))?;
    let array = array.cast::<PyUntypedArray>()?;
    if array.dtype().has_object() || array.dtype().kind() == b'U' {
        let kind = data.get_type().name()?;
        return Err(tc::Error::dtype(
            op,
            format!("cannot make a tensor of {kind}; expected numbers, nested lists of them, or an array"),
        )
        .into());
    }
    from_numpy(op, array)
}

fn from_numpy(op: &'static str, array: &Bound<'_, PyUntypedArray>) -> Result<Raw> {
    let dtype = array.dtype();
    let element = match (dtype.kind(), dtype.itemsize()) {
        (b'b', 1) => Element::Bool,
        (b'i', 1) => Element::I8,
        (b'i', 2) => Element::I16,
        (b'i', 4) => Element::I32,
        (b'i', 8) => Element::I64,
        (b'u', 1) => Element::U8,
        (b'u', 2) => Element::U16,
        (b'u', 4) => Element::U32,
        (b'f', 2) => Element::F16,
        (b'f', 4) => Element::F32,
        (b'f', 8) => Element::F64,
        // numpy has no bfloat16 of its own; the package ml_dtypes adds one.
        (_, 2) if dtype.getattr("name")?.eq("bfloat16")? => Element::BF16,
        _ => {
            let name = dtype.str()?;
            return Err(tc::Error::dtype(
                op,
                format!("an array of dtype {name} has no tensor counterpart; convert it with astype() first"),
            )
            .into());
        }
    };
    let source = Source {
        // SAFETY: the array object is alive, so its header is readable.
        data: unsafe { (*array.as_array_ptr()).fields.data.cast_const().cast() },
        dims: array.shape().to_vec(),
        strides: array.strides().to_vec(),
        element,
        swapped: dtype.is_native_byteorder() == Some(false),
    };
    // SAFETY: the array keeps its memory while it lives, and numpy's strides stay inside it. The GIL is held.
    Ok(unsafe { source.read(op) }?)
}

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
}

fn from_nested(op: &'static str, data: &Bound<'_, PyAny>, dtype: Option<DType>) -> Result<Raw> {
    let mut nested = Nested { op, dims: Vec::new(), values: Vec::new() };
    match nested.visit(data, 0) {
        Ok(()) => {}
        // Lists of arrays: numpy knows how to stack them.
        Err(Refusal::Array) => {
            let raw = from_array_like(op, data)?;
            return Ok(dtype.map_or(Ok(raw.clone()), |dtype| raw.to_dtype(dtype)).map_err(tc::Error::from)?);
        }
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
    let bounds = match dtype {
        DType::U8 => Some((0, i64::from(u8::MAX))),
        DType::U32 => Some((0, i64::from(u32::MAX))),
        _ => None,
    };
    if let Some(outside) = bounds.and_then(|(low, high)| values.iter().find(|v| v.as_i64() < low || v.as_i64() > high))
    {
        return Err(tc::Error::argument(
            op,
            format!("{} is outside the range of {}", outside.as_i64(), dtype.as_str()),
        )
        .into());
    }
    let raw = match dtype {
        DType::I64 => tc::raw::from_vec(values.iter().map(|v| v.as_i64()).collect(), dims),
        DType::U32 => tc::raw::from_vec(values.iter().map(|v| v.as_i64() as u32).collect(), dims),
        DType::U8 => tc::raw::from_vec(values.iter().map(|v| v.as_i64() as u8).collect(), dims),
        DType::F64 => tc::raw::from_vec(values.iter().map(|v| v.as_f64()).collect(), dims),
        _ => {
            let raw = tc::raw::from_vec(values.iter().map(|v| v.as_f64() as f32).collect(), dims);
            if dtype == DType::F32 { raw } else { raw.to_dtype(dtype).map_err(tc::Error::from)? }
        }
    };
    Ok(raw)
}

/// Why nested lists cannot be read here.
enum Refusal {
    /// An element is an array.
    Array,
    Error(crate::error::Error),
}

impl<E: Into<crate::error::Error>> From<E> for Refusal {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

struct Nested {
    op: &'static str,
    dims: Vec<usize>,
    values: Vec<Scalar>,
}

impl Nested {
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
        if self.values.is_empty() && self.dims.len() > depth {
            // An empty list came before: the shape is already complete.
            return Err(self.ragged(depth, "a number"));
        }
        if self.dims.len() != depth {
            return Err(self.ragged(depth, "a number"));
        }
        self.values.push(value);
        Ok(())
    }

    fn enter(&mut self, length: usize, depth: usize) -> std::result::Result<(), Refusal> {
        if depth >= MAX_DEPTH {
            return Err(tc::Error::shape(self.op, format!("lists are nested deeper than {MAX_DEPTH}")).into());
        }
        match self.dims.get(depth) {
            Some(&expected) if expected == length => Ok(()),
            None if self.values.is_empty() && self.dims.len() == depth => {
                self.dims.push(length);
                Ok(())
            }
            _ => Err(self.ragged(depth, &format!("a sequence of {length}"))),
        }
    }

    fn ragged(&self, depth: usize, found: &str) -> Refusal {
        let expected = self.dims.get(depth).map_or_else(|| "a number".to_owned(), |n| format!("a sequence of {n}"));
        tc::Error::shape(
            self.op,
            format!("nested lists are ragged: found {found} at depth {depth}, expected {expected}"),
        )
        .into()
    }

    fn scalar(&self, object: &Bound<'_, PyAny>) -> std::result::Result<Scalar, Refusal> {
        if let Ok(value) = object.cast::<PyFloat>() {
            return Ok(Scalar::Float(value.value()));
        }
        if let Ok(value) = object.cast::<PyBool>() {
            return Ok(Scalar::Bool(value.is_true()));
        }
        if object.is_instance_of::<PyInt>() {
            let value = object
                .extract()
                .map_err(|_| tc::Error::argument(self.op, format!("{object} does not fit in 64 bits")))?;
            return Ok(Scalar::Int(value));
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
        if object.hasattr("__array__")? && object.getattr("ndim")?.extract::<usize>()? > 0 {
            return Err(Refusal::Array);
        }
        if object.hasattr("__index__")? {
            return Ok(Scalar::Int(object.extract()?));
        }
        if object.hasattr("__float__")? {
            return Ok(Scalar::Float(object.extract()?));
        }
        let kind = object.get_type().name()?;
        Err(tc::Error::dtype(
            self.op,
            format!("cannot make a tensor of {kind}; expected numbers, nested lists of them, or an array"),
        )
        .into())
    }
}

/// A numpy array with a copy of the values.
///
/// # Errors
/// `DTypeError` for bf16, which numpy does not have.
pub fn to_numpy<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<NdArray<'py>> {
    fn array<'py, T: candle_core::WithDType + NumpyElement>(
        py: Python<'py>,
        tensor: &tc::Tensor,
    ) -> Result<NdArray<'py>> {
        let values = PyArray1::from_vec(py, tensor.to_vec::<T>()?);
        Ok(NdArray(values.reshape(tensor.dims())?.into_any()))
    }
    match tensor.dtype() {
        DType::F32 => array::<f32>(py, tensor),
        DType::F64 => array::<f64>(py, tensor),
        DType::F16 => array::<f16>(py, tensor),
        DType::U8 => array::<u8>(py, tensor),
        DType::U32 => array::<u32>(py, tensor),
        DType::I64 => array::<i64>(py, tensor),
        other => {
            Err(tc::Error::dtype("numpy", format!("numpy has no {}; convert with .to(\"f32\") first", other.as_str()))
                .into())
        }
    }
}

/// The elements in row-major order as Python numbers.
fn numbers<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<Vec<Bound<'py, PyAny>>> {
    if tc::raw::is_float(tensor.dtype()) {
        let values = tc::raw::to_f64_vec(tensor.raw())?;
        return Ok(values.into_iter().map(|v| v.into_bound_py_any(py)).collect::<PyResult<_>>()?);
    }
    let values = tensor.to_dtype(DType::I64)?.to_vec::<i64>()?;
    Ok(values.into_iter().map(|v| v.into_bound_py_any(py)).collect::<PyResult<_>>()?)
}

/// The only element.
pub fn item<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<Bound<'py, PyAny>> {
    if tc::raw::is_float(tensor.dtype()) {
        return Ok(tensor.item()?.into_bound_py_any(py)?);
    }
    if tensor.elem_count() != 1 {
        // The core's error.
        tensor.item()?;
    }
    Ok(tensor.to_dtype(DType::I64)?.to_vec::<i64>()?[0].into_bound_py_any(py)?)
}

/// Nested lists; a number without dimensions.
pub fn to_list<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<Bound<'py, PyAny>> {
    let mut level = numbers(py, tensor)?;
    for (dim, &size) in tensor.dims().iter().enumerate().rev() {
        let lists: usize = tensor.dims()[..dim].iter().product();
        level = (0..lists)
            .map(|i| PyList::new(py, &level[i * size..(i + 1) * size]).map(Bound::into_any))
            .collect::<PyResult<_>>()?;
    }
    Ok(level.swap_remove(0))
}
