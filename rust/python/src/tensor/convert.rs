//! Conversions between tensors and Python values: numpy arrays, nested lists, numbers.

use half::f16;
use numpy::prelude::*;
use numpy::{Element as NumpyElement, PyArray1, PyUntypedArray};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyList, PyTuple};
use tc::{DType, Raw};
use trainable_candle_core as tc;

use super::Tensor;
use super::nested;
use super::source::{Element, Source};
use crate::call::reading;
use crate::dlpack;
use crate::error::Result;
use crate::types::NdArray;

/// Copy the numbers in a Python object to new storage, and convert them to `dtype` if it is given. A [`Tensor`] and an
/// object with `__dlpack__` keep their device; other numbers are put on the CPU. `op` is the name of the operation for
/// errors.
///
/// # Errors
/// Those of [`nested::read`] for numbers and lists, of [`dlpack::import`], and of numpy for an object that numpy cannot
/// read; `DTypeError` if an array has other elements than numbers or no dtype can represent them.
pub fn to_raw(op: &'static str, data: &Bound<'_, PyAny>, dtype: Option<DType>) -> Result<Raw> {
    let raw = if let Ok(tensor) = data.cast::<Tensor>() {
        tc::raw::own_copy(tensor.get().0.raw())?
    } else if let Ok(array) = data.cast::<PyUntypedArray>() {
        from_numpy(op, array)?
    } else if data.is_instance_of::<PyList>() || data.is_instance_of::<PyTuple>() || is_number(data)? {
        match nested::read(op, data, dtype)? {
            // These numbers have the requested dtype already.
            Some(raw) => return Ok(raw),
            // The lists contain arrays, which numpy stacks.
            None => from_array_like(op, data)?,
        }
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

/// Whether `data` is a number without a dtype. An array or a scalar of numpy may have `__float__` too, but has a dtype.
/// (numpy's float64 is a subclass of Python's float, and counts as a number without a dtype.)
fn is_number(data: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(data.is_instance_of::<PyFloat>()
        || data.is_instance_of::<PyInt>()
        || (data.hasattr("__float__")? && !data.hasattr("__array__")?))
}

/// Copy the numbers of an object that numpy can read: one with `__array__` or the buffer protocol, or a sequence.
fn from_array_like(op: &'static str, data: &Bound<'_, PyAny>) -> Result<Raw> {
    let array = data.py().import("numpy")?.call_method1("asarray", (data,))?;
    let array = array.cast::<PyUntypedArray>()?;
    let is_text = array.dtype().kind() == b'U';
    if array.dtype().has_object() || is_text {
        let found = data.get_type().name()?;
        return Err(tc::Error::dtype(
            op,
            format!("cannot make a tensor of {found}; expected numbers, nested lists of them, or an array"),
        )
        .into());
    }
    from_numpy(op, array)
}

/// Copy the numbers of a numpy array.
///
/// # Errors
/// `DTypeError` if no dtype can represent the array's elements.
fn from_numpy(op: &'static str, array: &Bound<'_, PyUntypedArray>) -> Result<Raw> {
    let dtype = array.dtype();
    // Numpy's letter for the kind of number, and the bytes of a number.
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
        // numpy itself has no bfloat16, but the package ml_dtypes adds one.
        (_, 2) if dtype.getattr("name")?.eq("bfloat16")? => Element::BF16,
        _ => {
            let name = dtype.str()?;
            return Err(tc::Error::dtype(
                op,
                format!("no tensor dtype can represent an array of dtype {name}; convert it with astype() first"),
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
    // SAFETY: the array exists during the call and keeps its memory alive, and numpy's strides stay inside that memory.
    // The GIL is held, so no Python code resizes the array meanwhile.
    Ok(unsafe { source.read(op) }?)
}

/// Return an error for a tensor on a GPU inside a captured function: while the graph is recorded, the tensor's values
/// are not computed yet. Outside of captured functions, `refuse` returns no error.
fn check_readable(op: &'static str, tensor: &tc::Tensor) -> Result<()> {
    if tensor.device().is_cpu() { Ok(()) } else { Ok(tc::capture::refuse(op)?) }
}

/// A numpy array with a copy of the values.
///
/// # Errors
/// `DTypeError` for bf16, which numpy does not have; that of [`check_readable`].
pub fn to_numpy<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<NdArray<'py>> {
    fn array<'py, T: candle_core::WithDType + NumpyElement + Send>(
        py: Python<'py>,
        tensor: &tc::Tensor,
    ) -> Result<NdArray<'py>> {
        // Here and below, `reading` releases the GIL if the tensor is on a GPU or has many elements.
        let values = PyArray1::from_vec(py, reading(py, tensor, || tensor.to_vec::<T>())?);
        Ok(NdArray(values.reshape(tensor.dims())?.into_any()))
    }
    check_readable("numpy", tensor)?;
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
        let values = reading(py, tensor, || tc::raw::to_f64_vec(tensor.raw()))?;
        return Ok(values.into_iter().map(|v| v.into_bound_py_any(py)).collect::<PyResult<_>>()?);
    }
    let values = reading(py, tensor, || integers(tensor))?;
    Ok(values.into_iter().map(|v| v.into_bound_py_any(py)).collect::<PyResult<_>>()?)
}

/// The only element as a Python number.
///
/// # Errors
/// `ShapeError` if there is not exactly one element; that of [`check_readable`].
pub fn item<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<Bound<'py, PyAny>> {
    check_readable("item", tensor)?;
    if tc::raw::is_float(tensor.dtype()) {
        return Ok(reading(py, tensor, || tensor.item())?.into_bound_py_any(py)?);
    }
    if tensor.elem_count() != 1 {
        // `tensor.item` returns the error.
        tensor.item()?;
    }
    Ok(reading(py, tensor, || integers(tensor))?[0].into_bound_py_any(py)?)
}

/// The elements in row-major order, for a tensor of an integer dtype. The CPU converts them to i64.
pub fn integers(tensor: &tc::Tensor) -> tc::Result<Vec<i64>> {
    tensor.to_device(&tc::Device::Cpu)?.to_dtype(DType::I64)?.to_vec()
}

/// The elements as nested lists. A tensor without dimensions gives a number.
///
/// # Errors
/// That of [`check_readable`].
pub fn to_list<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<Bound<'py, PyAny>> {
    check_readable("tolist", tensor)?;
    let mut items = numbers(py, tensor)?;
    // From the last dimension to the first, every `size` neighbouring items become one list.
    for (dim, &size) in tensor.dims().iter().enumerate().rev() {
        let lists: usize = tensor.dims()[..dim].iter().product();
        items = (0..lists)
            .map(|i| PyList::new(py, &items[i * size..(i + 1) * size]).map(Bound::into_any))
            .collect::<PyResult<_>>()?;
    }
    Ok(items.swap_remove(0))
}
