//! The class `Tensor`: properties and Python's protocols. Operations are in the other files of this folder.
//!
//! `compute`, `reading` and `catch_panics` run a function of the core and convert its panics to errors. `compute` also
//! releases the GIL if the given number of elements is large. `reading`, for functions that copy values to the host,
//! releases it if the tensor is large or on a GPU.

mod arithmetic;
mod convert;
mod create;
mod elementwise;
mod index;
mod nested;
mod operand;
mod promote;
mod reduce;
mod shape;
pub mod source;

use std::collections::BTreeMap;
use std::convert::Infallible;

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript};
use trainable_candle_core as tc;

pub use convert::to_raw;
pub use create::{
    arange, empty_like, eye, from_data, full, ones, ones_like, rand, randint, randn, tensor, zeros, zeros_like,
};
pub use elementwise::where_;
pub use operand::Operand;
pub use shape::{cat, stack};

use crate::argument::Expected;
use crate::call::{catch_panics, compute, reading};
use crate::device;
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::types::{Anything, NdArray, Sizes};
use crate::var::Var;

/// An immutable array of numbers on a device.
///
/// Make one with `tensor`, `zeros`, `randn` and similar functions. The tape records operations on tensors that depend
/// on a `Var`, and `backward` computes gradients from the tape. Shapes broadcast as in numpy. Elementwise arithmetic
/// and comparisons of two tensors promote dtypes as torch does; other operations need tensors of one dtype. A Python
/// number gets the tensor's dtype, except that a Python float and a tensor of integers give a result in f32.
///
/// ```python
/// t = tc.tensor([[1.0, 2.0], [3.0, 4.0]])
/// assert (t @ t.T).sum(1).tolist() == [16.0, 36.0]
/// assert (t.shape, t.dtype, t.device) == ((2, 2), "f32", "cpu")
/// ```
#[pyclass(frozen, subclass, module = "trainable_candle")]
pub struct Tensor(pub tc::Tensor);

impl From<tc::Tensor> for Tensor {
    fn from(inner: tc::Tensor) -> Self {
        Self(inner)
    }
}

#[pymethods]
impl Tensor {
    /// The sizes of the dimensions.
    #[getter]
    fn shape(&self) -> Sizes<'_> {
        Sizes(self.0.dims())
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.0.rank()
    }

    /// The dtype; compares equal to its names, such as "f32" and "float32".
    #[getter]
    fn dtype(&self) -> DType {
        DType::new(self.0.dtype())
    }

    /// The device, such as "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        device::name(self.0.device())
    }

    /// Whether the tensor is a variable or depends on one. If so, backward passes compute the tensor's gradient.
    #[getter]
    fn requires_grad(&self) -> bool {
        self.0.requires_grad()
    }

    /// Whether this is a variable or a constant, not the result of a recorded operation.
    #[getter]
    fn is_leaf(&self) -> bool {
        self.0.is_leaf()
    }

    /// The number of bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.elem_count() * self.0.dtype().size_in_bytes()
    }

    /// Return the number of elements.
    fn numel(&self) -> usize {
        self.0.elem_count()
    }

    /// Return whether the elements are in memory in row-major order without gaps.
    fn is_contiguous(&self) -> bool {
        self.0.raw().is_contiguous()
    }

    /// Return a tensor with the same values (shared storage), detached from the tape.
    fn detach(&self) -> Self {
        Self(self.0.detach())
    }

    /// Return a tensor with the same values, whose elements are in memory in row-major order. The values are copied
    /// only if this tensor is not contiguous.
    fn contiguous(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.contiguous()).map(Self)
    }

    /// Return a tensor with the same values in another dtype or on another device.
    ///
    /// Casts between floating point dtypes and copies to another device are differentiable. The gradient has this
    /// tensor's dtype and device.
    ///
    /// Args:
    ///     target: a dtype ("bf16", "float32", tc.float16) or a device ("cpu", "cuda", "cuda:1").
    ///     dtype: the dtype, by keyword.
    ///     device: the device, by keyword.
    ///
    /// Raises:
    ///     ArgumentError: if `target` and a keyword are two dtypes or two devices.
    ///     DTypeError: if the dtype is unknown.
    ///     DeviceError: if the device is unknown.
    ///     CudaUnavailableError: if the device is a CUDA device and CUDA cannot be used. The message says why.
    ///     OutOfMemoryError: if the result does not fit into memory.
    #[pyo3(signature = (target=None, *, dtype=None, device=None))]
    fn to(
        &self,
        py: Python<'_>,
        target: Option<Target>,
        dtype: Option<DTypeArg>,
        device: Option<device::DeviceArg>,
    ) -> Result<Self> {
        let (mut dtype, mut device) = (dtype.map(|d| d.0), device.map(|d| d.0));
        match target {
            Some(Target::DType(target)) if dtype.is_none() => dtype = Some(target.0),
            Some(Target::Device(target)) if device.is_none() => device = Some(target.0),
            Some(_) => {
                return Err(tc::Error::argument("to", "found two dtypes or two devices; drop the keyword").into());
            }
            None => {}
        }
        reading(py, &self.0, || {
            let cast = dtype.map_or_else(|| Ok(self.0.clone()), |dtype| self.0.to_dtype(dtype))?;
            device.map_or_else(|| Ok(cast.clone()), |device| cast.to_device(&device))
        })
        .map(Self)
    }

    /// Return a tensor with the same values in f32.
    fn float(&self, py: Python<'_>) -> Result<Self> {
        compute(py, self.0.elem_count(), || self.0.to_dtype(candle_core::DType::F32)).map(Self)
    }

    /// Return a numpy array with a copy of the values. Gradients do not flow through the array.
    ///
    /// For a view without a copy (read-only), use `numpy.from_dlpack(t)`.
    ///
    /// Raises:
    ///     DTypeError: for bf16, which numpy does not have; convert with `.to("f32")` first.
    ///     DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
    fn numpy<'py>(&self, py: Python<'py>) -> Result<NdArray<'py>> {
        convert::to_numpy(py, &self.0)
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> Result<NdArray<'py>> {
        if copy == Some(false) {
            return Err(tc::Error::argument(
                "__array__",
                "numpy needs a copy of the values; pass copy=True or copy=None, or use numpy.from_dlpack()",
            )
            .into());
        }
        let array = convert::to_numpy(py, &self.0)?;
        match dtype {
            Some(dtype) => Ok(NdArray(array.0.call_method1("astype", (dtype,))?)),
            None => Ok(array),
        }
    }

    /// This priority makes numpy call the operator of the tensor in an expression such as `array + tensor`.
    #[classattr]
    #[allow(non_upper_case_globals)]
    const __array_priority__: f64 = 1000.0;

    /// Return the only element as a Python number.
    ///
    /// Raises:
    ///     ShapeError: if there is not exactly one element.
    ///     DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
    fn item<'py>(&self, py: Python<'py>) -> Result<Anything<'py>> {
        convert::item(py, &self.0).map(Anything)
    }

    /// Return the elements as nested lists of Python numbers. A tensor without dimensions gives a number.
    ///
    /// Raises:
    ///     DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
    fn tolist<'py>(&self, py: Python<'py>) -> Result<Anything<'py>> {
        convert::to_list(py, &self.0).map(Anything)
    }

    fn __float__(&self, py: Python<'_>) -> Result<f64> {
        reading(py, &self.0, || self.0.item())
    }

    /// Format the only element like a Python number. Without a format specification, a tensor with dimensions gives its
    /// `repr`, as in torch.
    ///
    /// Raises:
    ///     ShapeError: if there is a format specification, and not exactly one element.
    ///     DeviceError: for a tensor on a GPU inside a function that is being captured (`tc.cuda.capture`).
    fn __format__(slf: &Bound<'_, Self>, spec: &str) -> Result<String> {
        let tensor = &slf.get().0;
        if spec.is_empty() && tensor.rank() > 0 {
            return Self::__repr__(slf);
        }
        let number = convert::item(slf.py(), tensor)?;
        Ok(number.call_method1(pyo3::intern!(slf.py(), "__format__"), (spec,))?.extract()?)
    }

    fn __int__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(convert::item(py, &self.0)?.call_method0(pyo3::intern!(py, "__int__"))?)
    }

    fn __index__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        if tc::raw::is_float(self.0.dtype()) {
            // Python also asks for an index to repeat a list in `list * tensor`.
            let message = format!(
                "a {} tensor is not an index, expected an integer dtype; to multiply a tensor by a list, convert the list \
                 with tensor()",
                self.0.dtype().as_str()
            );
            return Err(tc::Error::dtype("index", message).into());
        }
        convert::item(py, &self.0)
    }

    fn __bool__(&self, py: Python<'_>) -> Result<bool> {
        if self.0.elem_count() != 1 {
            let message = format!(
                "the truth of {} elements (shape {:?}) is ambiguous; compare one element",
                self.0.elem_count(),
                self.0.dims()
            );
            return Err(tc::Error::shape("bool", message).into());
        }
        Ok(reading(py, &self.0, || self.0.item())? != 0.0)
    }

    fn __len__(&self) -> Result<usize> {
        let first = self.0.dims().first().copied();
        first.ok_or_else(|| tc::Error::shape("len", "a tensor without dimensions has no length").into())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> Result<TensorIterator<'py>> {
        if self.0.rank() == 0 {
            return Err(tc::Error::shape("iter", "a tensor without dimensions cannot be iterated").into());
        }
        let slices =
            (0..self.0.dims()[0]).map(|index| catch_panics(|| self.0.narrow(0, index, 1)?.squeeze(0)).map(Self));
        let slices = slices.map(|slice| Ok(Bound::new(py, slice?)?.into_any())).collect::<Result<Vec<_>>>()?;
        Ok(TensorIterator(PyList::new(py, slices)?.try_iter()?))
    }

    /// Return the function and the arguments from which `pickle` or `copy` makes the tensor again. A variable becomes a
    /// variable without a gradient; any other tensor becomes a constant.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Result<(Anything<'py>, (NdArray<'py>, &'static str, String))> {
        let (tensor, py) = (&slf.get().0, slf.py());
        let name = if slf.is_instance_of::<Var>() { "Var" } else { "tensor" };
        let constructor = py.import("trainable_candle._core")?.getattr(name)?;
        Ok((Anything(constructor), (numpy_values(py, tensor)?, tensor.dtype().as_str(), device::name(tensor.device()))))
    }

    /// Hash by identity, not by value.
    fn __hash__(slf: &Bound<'_, Self>) -> isize {
        // Objects are aligned to 16 bytes, so the lowest four bits are always 0.
        (slf.as_ptr() as isize) >> 4
    }

    fn __repr__(slf: &Bound<'_, Self>) -> Result<String> {
        let tensor = &slf.get().0;
        let kind = if slf.is_exact_instance_of::<Self>() { "tensor" } else { "Var" };
        let py = slf.py();
        let grad = if kind == "tensor" && tensor.requires_grad() { ", requires_grad=True" } else { "" };
        if tensor.elem_count() == 0 {
            // numpy rejects the shape of an empty array if the product of the sizes other than 0 overflows.
            return Ok(format!("{kind}([], shape={:?}, dtype={}{grad})", tensor.dims(), tensor.dtype().as_str()));
        }
        let options = PyDict::new(py);
        options.set_item("separator", ", ")?;
        // numpy indents lines after the first by the length of the prefix.
        options.set_item("prefix", format!("{kind}("))?;
        // numpy abbreviates arrays of more elements with `...`.
        options.set_item("threshold", 1000)?;
        let text = py.import("numpy")?.call_method("array2string", (numpy_values(py, tensor)?,), Some(&options))?;
        Ok(format!("{kind}({text}, dtype={}{grad})", tensor.dtype().as_str()))
    }
}

/// The values as a numpy array. bf16 values become f32, because numpy does not have bf16.
fn numpy_values<'py>(py: Python<'py>, tensor: &tc::Tensor) -> Result<NdArray<'py>> {
    if tensor.dtype() == candle_core::DType::BF16 {
        return convert::to_numpy(py, &tensor.detach().to_dtype(candle_core::DType::F32)?);
    }
    convert::to_numpy(py, tensor)
}

/// The argument `target` of `Tensor.to`: a dtype or a device.
pub enum Target {
    DType(DTypeArg),
    Device(device::DeviceArg),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Target {
    type Error = PyErr;
    // The annotation of a dtype includes `str`, which is the annotation of a device.
    const INPUT_TYPE: PyStaticExpr = <DTypeArg as FromPyObject<'_, '_>>::INPUT_TYPE;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(text) = object.cast::<pyo3::types::PyString>()
            && device::looks_like_device(text.to_str()?)
        {
            return Ok(Self::Device(object.extract()?));
        }
        Ok(Self::DType(object.extract()?))
    }
}

/// An iterator over tensors.
pub struct TensorIterator<'py>(pub Bound<'py, PyIterator>);

impl<'py> IntoPyObject<'py> for TensorIterator<'py> {
    type Target = PyIterator;
    type Output = Bound<'py, PyIterator>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr =
        type_hint_subscript!(type_hint_identifier!("collections.abc", "Iterator"), Tensor::TYPE_HINT);

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

// `EXPECTED` describes the type in the error about an argument of another type.
impl Expected for PyRef<'_, Tensor> {
    const EXPECTED: &'static str = "a Tensor, which trainable_candle.tensor() makes";
}

impl Expected for BTreeMap<String, PyRef<'_, Tensor>> {
    const EXPECTED: &'static str = "a dict of names and Tensors";
}
