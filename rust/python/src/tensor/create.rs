//! Functions that make tensors.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tc::DType;
use trainable_candle_core as tc;

use super::convert::integers;
use super::operand::{Kind, Number, Operand};
use super::{Tensor, to_raw};
use crate::arguments::{Integer, Shape};
use crate::call::compute;
use crate::device;
use crate::dtype::DTypeArg;
use crate::error::Result;

fn dtype_or_f32(dtype: Option<DTypeArg>) -> DType {
    dtype.map_or(DType::F32, |dtype| dtype.0)
}

/// The number of elements of a shape, by which `compute` decides whether to release the GIL.
fn work(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |n, &size| n.saturating_mul(size))
}

/// A tensor on `device` with the values of `data`, in `dtype` if it is given. If `data` is a tensor, the result is
/// detached from the tape, and may share the storage of `data`.
///
/// # Errors
/// Those of [`to_raw`]; those of the conversion and of the copy to `device`.
pub fn from_data(data: &Bound<'_, PyAny>, dtype: Option<DType>, device: &tc::Device) -> Result<tc::Tensor> {
    let tensor = match data.cast::<Tensor>() {
        // Convert the dtype on the tensor's device, then copy the result.
        Ok(tensor) => {
            let tensor = tensor.get().0.detach();
            dtype.map_or(Ok(tensor.clone()), |dtype| tensor.to_dtype(dtype))?
        }
        Err(_) => to_raw("tensor", data, dtype)?.into(),
    };
    Ok(tensor.to_device(device)?)
}

/// Make a tensor with a copy of `data`, detached from the tape.
///
/// Args:
///     data: a number, nested lists of numbers, a Tensor, a numpy array, or any object with `__dlpack__` or
///         `__array__`.
///     dtype: the dtype of the result. By default, an array keeps its dtype, except that int8, int16 and int32 become
///         i64, uint16 becomes u32, and bool becomes u8. Numbers and lists become f32 if they contain a float or are
///         empty, u8 if all are bools, and i64 otherwise. An integer dtype drops the fractions of floats.
///     device: the device. By default, a Tensor keeps its device, and other data are put on the CPU.
///
/// Raises:
///     DTypeError: if the data are not numbers, no dtype can represent them (complex, uint64), or `dtype` is unknown.
///     ShapeError: if nested lists are ragged or deeper than 32.
///     ValueError: if lists contain arrays of different shapes.
///     ArgumentError: if a number, alone or in lists, is an integer outside the range of i64; if `dtype` is an integer
///         dtype and such a number is NaN or outside the range of `dtype`; or if lists contain a Tensor.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the copy does not fit into memory.
#[pyfunction]
#[pyo3(signature = (data, dtype=None, device=None))]
pub fn tensor(data: &Bound<'_, PyAny>, dtype: Option<DTypeArg>, device: Option<&str>) -> Result<Tensor> {
    let device = device.map(device::parse).transpose()?;
    if let Ok(tensor) = data.cast::<Tensor>() {
        let copy = tc::Tensor::from(tc::raw::own_copy(tensor.get().0.raw())?);
        let copy = dtype.map_or(Ok(copy.clone()), |dtype| copy.to_dtype(dtype.0))?;
        return Ok(Tensor(device.map_or(Ok(copy.clone()), |device| copy.to_device(&device))?));
    }
    from_data(data, dtype.map(|dtype| dtype.0), &device.unwrap_or(tc::Device::Cpu)).map(Tensor)
}

/// Make a tensor of zeros.
///
/// Args:
///     shape: the sizes, as arguments or one sequence.
///     dtype: the dtype; default f32.
///     device: the device.
///
/// Raises:
///     ShapeError: if a size is negative.
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]", dtype=None, device="cpu"))]
pub fn zeros(py: Python<'_>, shape: &Bound<'_, PyTuple>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let sizes = Shape::from_arguments(shape)?.sizes("zeros")?;
    let device = device::parse(device)?;
    compute(py, work(&sizes), || tc::Tensor::zeros(sizes, dtype_or_f32(dtype), &device)).map(Tensor)
}

/// Make a tensor of ones.
///
/// Args:
///     shape: the sizes, as arguments or one sequence.
///     dtype: the dtype; default f32.
///     device: the device.
///
/// Raises:
///     ShapeError: if a size is negative.
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]", dtype=None, device="cpu"))]
pub fn ones(py: Python<'_>, shape: &Bound<'_, PyTuple>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let sizes = Shape::from_arguments(shape)?.sizes("ones")?;
    let device = device::parse(device)?;
    compute(py, work(&sizes), || tc::Tensor::ones(sizes, dtype_or_f32(dtype), &device)).map(Tensor)
}

/// Make a tensor whose elements all have the value `value`.
///
/// Args:
///     shape: the sizes of the dimensions.
///     value: a number, or a tensor or an array of one element.
///     dtype: the dtype; default f32 for a float and i64 for an integer.
///     device: the device.
///
/// Raises:
///     DTypeError: if the dtype is unknown, or it is an integer dtype and the value is a float.
///     ArgumentError: if the value is an integer outside the range of an integer dtype, or of f64 if the dtype is
///         floating point.
///     ShapeError: if a size is negative, or `value` is a tensor or an array that does not have exactly one element.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (shape, value, dtype=None, device="cpu"))]
pub fn full(py: Python<'_>, shape: Shape, value: Operand<'_>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let sizes = shape.sizes("full")?;
    let device = device::parse(device)?;
    let value = match value {
        Operand::Number(number) => number,
        Operand::Tensor(tensor) => only_number(tensor)?,
        Operand::Array(tensor) => only_number(&tensor)?,
    };
    let inferred = if value.is_integer() { DType::I64 } else { DType::F32 };
    let dtype = dtype.map_or(inferred, |dtype| dtype.0);
    compute(py, work(&sizes), || {
        if tc::raw::is_float(dtype) {
            return tc::Tensor::full(value.float("full")?, sizes, dtype, &device);
        }
        // `tc::Tensor::full` takes an f64, which cannot hold every i64. So repeat an integer tensor of one element.
        tc::raw::check_allocation("full", &sizes, dtype)?;
        let one = value.to_tensor("full", dtype, &device)?;
        // `own_copy` gives every element of the broadcast view its own place in memory.
        Ok(tc::raw::own_copy(one.broadcast_as(sizes)?.raw())?.into())
    })
    .map(Tensor)
}

/// The only element of a tensor.
///
/// # Errors
/// [`tc::Error::Shape`] if there is not exactly one element; those of reading a tensor on a GPU.
fn only_number(tensor: &tc::Tensor) -> tc::Result<Number> {
    // `item` returns an f64, which cannot hold every i64, so an integer is read again by `integers`.
    let value = tensor.item()?;
    if tc::raw::is_float(tensor.dtype()) {
        return Ok(Number { value, kind: Kind::Float });
    }
    Ok(Number::integer(integers(tensor)?[0]))
}

/// A tensor of `value` in the shape of `tensor`. By default it has the dtype and the device of `tensor`.
fn filled_like(
    py: Python<'_>,
    value: f64,
    tensor: &tc::Tensor,
    dtype: Option<DTypeArg>,
    device: Option<&str>,
) -> Result<Tensor> {
    let dtype = dtype.map_or_else(|| tensor.dtype(), |dtype| dtype.0);
    let device = device.map_or_else(|| Ok(tensor.device().clone()), device::parse)?;
    compute(py, tensor.elem_count(), || tc::Tensor::full(value, tensor.shape(), dtype, &device)).map(Tensor)
}

/// Return zeros in the shape of `input`. By default they have the dtype and the device of `input`.
///
/// ```python
/// x = tc.tensor([1, 2, 3])
/// assert tc.zeros_like(x, dtype="f32").shape == x.shape
/// ```
///
/// Raises:
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (input, dtype=None, device=None))]
pub fn zeros_like(py: Python<'_>, input: &Tensor, dtype: Option<DTypeArg>, device: Option<&str>) -> Result<Tensor> {
    filled_like(py, 0.0, &input.0, dtype, device)
}

/// Return ones in the shape of `input`. By default they have the dtype and the device of `input`.
///
/// ```python
/// x = tc.tensor([1, 2, 3])
/// assert tc.ones_like(x, dtype="f32").shape == x.shape
/// ```
///
/// Raises:
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (input, dtype=None, device=None))]
pub fn ones_like(py: Python<'_>, input: &Tensor, dtype: Option<DTypeArg>, device: Option<&str>) -> Result<Tensor> {
    filled_like(py, 1.0, &input.0, dtype, device)
}

/// Make a tensor of unspecified values in the shape of `input`, for callers that do not read the values. By default it
/// has the dtype and the device of `input`.
///
/// ```python
/// x = tc.tensor([1, 2, 3])
/// assert tc.empty_like(x, dtype="f32").shape == x.shape
/// ```
///
/// Raises:
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (input, dtype=None, device=None))]
pub fn empty_like(py: Python<'_>, input: &Tensor, dtype: Option<DTypeArg>, device: Option<&str>) -> Result<Tensor> {
    // The values may be any, so zeros will do.
    filled_like(py, 0.0, &input.0, dtype, device)
}

/// The number in an argument of `arange`.
///
/// # Errors
/// `ArgumentError` if the argument is a tensor or an array.
fn number(operand: &Operand<'_>) -> Result<Number> {
    match operand {
        Operand::Number(number) => Ok(*number),
        _ => Err(tc::Error::argument("arange", "found a tensor or an array, expected numbers; pass its item()").into()),
    }
}

/// Return the numbers `start`, `start + step`, ... up to but not including `end`.
///
/// ```python
/// assert tc.arange(4).tolist() == [0, 1, 2, 3]
/// assert tc.arange(1, 2, 0.5).tolist() == [1.0, 1.5]
/// ```
///
/// Args:
///     start: the first value. If `end` is not given, `start` is the end, and the first value is 0.
///     end: the end of the range, which is not one of the values.
///     step: the difference between neighbouring values.
///     dtype: the dtype; default i64 if all arguments are integers, else f32. The values are exact if all arguments are
///         integers in the range of i64 and the dtype is i64; otherwise they are computed in f64 and then converted.
///     device: the device.
///
/// Raises:
///     ArgumentError: if `step` is 0 or so small that f64 cannot represent the number of values, or if an argument is
///         non-finite, a tensor or an array.
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the values do not fit into memory.
#[pyfunction]
#[pyo3(signature = (start, end=None, step=None, dtype=None, device="cpu"))]
pub fn arange(
    start: Operand<'_>,
    end: Option<Operand<'_>>,
    step: Option<Operand<'_>>,
    dtype: Option<DTypeArg>,
    device: &str,
) -> Result<Tensor> {
    let start_or_end = number(&start)?;
    let (start, end) = match end {
        Some(end) => (start_or_end, number(&end)?),
        None => (Number::integer(0), start_or_end),
    };
    let step = step.as_ref().map_or(Ok(Number::integer(1)), number)?;
    let numbers = [start, end, step];
    let count = ((end.value - start.value) / step.value).ceil();
    if step.value == 0.0 || !count.is_finite() || numbers.iter().any(|n| !n.value.is_finite()) {
        let message = format!(
            "from {} to {} by {} is not a finite range; expected finite numbers, and a step that is neither 0 nor too small",
            start.text(),
            end.text(),
            step.text()
        );
        return Err(tc::Error::argument("arange", message).into());
    }
    let inferred = if numbers.iter().all(|n| n.is_integer()) { DType::I64 } else { DType::F32 };
    let dtype = dtype.map_or(inferred, |dtype| dtype.0);
    // In i128, because the difference of two i64 numbers may be outside the range of i64.
    let exact = numbers.map(|n| if let Kind::Integer(value) = n.kind { Some(i128::from(value)) } else { None });
    let raw = if let (DType::I64, [Some(start), Some(end), Some(step)]) = (dtype, exact) {
        let distance = (end - start) * step.signum();
        // The quotient of the distance and the step, rounded up.
        let count = if distance > 0 { (distance - 1) / step.abs() + 1 } else { 0 };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        tc::raw::check_allocation("arange", &[count], dtype)?;
        let values: Vec<i64> = (0..count).map(|i| (start + i as i128 * step) as i64).collect();
        tc::raw::from_vec(values, count)
    } else {
        let count = count.max(0.0) as usize;
        tc::raw::check_allocation("arange", &[count], DType::F64)?;
        let values: Vec<f64> = (0..count).map(|i| start.value + i as f64 * step.value).collect();
        tc::raw::from_vec(values, count).to_dtype(dtype).map_err(tc::Error::from)?
    };
    Ok(Tensor(tc::Tensor::from(raw).to_device(&device::parse(device)?)?))
}

/// Make the identity matrix (n, m): ones on the diagonal, zeros elsewhere.
///
/// ```python
/// assert tc.eye(2).tolist() == [[1.0, 0.0], [0.0, 1.0]]
/// ```
///
/// Args:
///     n: the number of rows.
///     m: the number of columns; default `n`.
///     dtype: the dtype; default f32.
///     device: the device.
///
/// Raises:
///     ArgumentError: if `n` or `m` is negative.
///     DTypeError: if the dtype is unknown.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (n, m=None, dtype=None, device="cpu"))]
pub fn eye(n: Integer, m: Option<Integer>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let n = n.count("eye", "n")?;
    let m = m.map_or(Ok(n), |m| m.count("eye", "m"))?;
    // `check_allocation` returns the number of elements, n · m.
    let count = tc::raw::check_allocation("eye", &[n, m], DType::F32)?;
    let mut values = vec![0f32; count];
    // From one element of the diagonal to the next, there are m + 1 elements in row-major order.
    values.iter_mut().step_by(m.saturating_add(1)).take(n.min(m)).for_each(|v| *v = 1.0);
    let raw = tc::raw::from_vec(values, (n, m)).to_dtype(dtype_or_f32(dtype)).map_err(tc::Error::from)?;
    Ok(Tensor(tc::Tensor::from(raw).to_device(&device::parse(device)?)?))
}

/// Draw random values, uniform in [0, 1), from the library's generator (see `manual_seed`).
///
/// Args:
///     shape: the sizes, as arguments or one sequence.
///     dtype: a floating point dtype; default f32.
///     device: the device.
///
/// Raises:
///     DTypeError: if the dtype is unknown or not floating point.
///     ShapeError: if a size is negative.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]", dtype=None, device="cpu"))]
pub fn rand(py: Python<'_>, shape: &Bound<'_, PyTuple>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let sizes = Shape::from_arguments(shape)?.sizes("rand")?;
    let device = device::parse(device)?;
    compute(py, work(&sizes), || tc::Tensor::rand(0.0, 1.0, sizes, dtype_or_f32(dtype), &device)).map(Tensor)
}

/// Draw random values from the standard normal distribution, from the library's generator (see `manual_seed`).
///
/// Args:
///     shape: the sizes, as arguments or one sequence.
///     dtype: a floating point dtype; default f32.
///     device: the device.
///
/// Raises:
///     DTypeError: if the dtype is unknown or not floating point.
///     ShapeError: if a size is negative.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]", dtype=None, device="cpu"))]
pub fn randn(py: Python<'_>, shape: &Bound<'_, PyTuple>, dtype: Option<DTypeArg>, device: &str) -> Result<Tensor> {
    let sizes = Shape::from_arguments(shape)?.sizes("randn")?;
    let device = device::parse(device)?;
    compute(py, work(&sizes), || tc::Tensor::randn(0.0, 1.0, sizes, dtype_or_f32(dtype), &device)).map(Tensor)
}

/// Draw random i64 integers, uniform in [low, high), from the library's generator (see `manual_seed`).
///
/// Args:
///     low: the smallest value.
///     high: one more than the largest value.
///     shape: the sizes of the dimensions.
///     device: the device.
///
/// Raises:
///     ArgumentError: if `low` or `high` is outside the range of i64, or the range [low, high) is empty or has more
///         than 2**32 - 1 values.
///     ShapeError: if a size is negative.
///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
///     OutOfMemoryError: if the tensor does not fit into memory.
#[pyfunction]
#[pyo3(signature = (low, high, shape, device="cpu"))]
pub fn randint(py: Python<'_>, low: Integer, high: Integer, shape: Shape, device: &str) -> Result<Tensor> {
    let (low, high) = (low.signed("randint", "low")?, high.signed("randint", "high")?);
    let sizes = shape.sizes("randint")?;
    let device = device::parse(device)?;
    // The number of values from `low` to `high` - 1.
    let span = high.checked_sub(low).and_then(|span| u32::try_from(span).ok()).filter(|&span| span > 0);
    let span = span.ok_or_else(|| {
        tc::Error::argument(
            "randint",
            format!("the range from {low} to {high} is empty or too wide; expected 1 to 2**32 - 1 values"),
        )
    })?;
    let count = tc::raw::check_allocation("randint", &sizes, DType::I64)?;
    compute(py, count, || {
        // Integers from 0 to span - 1.
        let mut values = tc::rng::integers_vec(count, span)?;
        values.iter_mut().for_each(|v| *v += low);
        tc::Tensor::from(tc::raw::from_vec(values, sizes)).to_device(&device)
    })
    .map(Tensor)
}
