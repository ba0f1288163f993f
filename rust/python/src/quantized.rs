//! The Python class of quantized matrices, and the function that quantizes.
//!
//! `compute` takes the number of elements that a call works on, and releases the GIL if there are many. `reading`
//! decides this by the tensor that the call copies to the host.

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyTypeInfo, type_hint_union};
use trainable_candle_core as tc;

use crate::call::{compute, reading};
use crate::device::{self, DeviceArg};
use crate::dtype::{DType, DTypeArg};
use crate::error::Result;
use crate::named::NamedTensors;
use crate::tensor::Tensor;
use crate::types::Sizes;

/// A frozen matrix, stored as a code of four to eight bits for each element, and scales. `quantize` makes one, and
/// `nn.functional.linear` takes it as a weight.
///
/// ```python
/// weight = tc.quantize(tc.randn(64, 128), "int8")
/// y = tc.nn.functional.linear(tc.randn(3, 128), weight)
/// assert y.shape == (3, 64)
/// assert weight.nbytes == 64 * 128 + 64 * 4  # a byte for each element, an f32 scale for each row
/// ```
#[pyclass(frozen, module = "trainable_candle")]
pub struct QuantizedTensor(pub tc::Quantized);

#[pymethods]
impl QuantizedTensor {
    /// Make a matrix from ggml blocks, as GGUF files store them.
    ///
    /// Args:
    ///     blocks: u8, (rows, number of bytes of each row's blocks).
    ///     format: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k" or "q6_k".
    ///     dtype: the dtype of the values that the matrix represents; default f32.
    ///
    /// Raises:
    ///     ArgumentError: if the format is unknown.
    ///     ShapeError: if `blocks` is not a matrix, or the bytes of a row are not a whole number of blocks.
    ///     DTypeError: if `blocks` is not u8, or `dtype` is not floating point.
    #[staticmethod]
    #[pyo3(signature = (blocks, format, dtype=None))]
    fn from_blocks(blocks: &Tensor, format: &str, dtype: Option<DTypeArg>) -> Result<Self> {
        let format = tc::quantized::Ggml::of_name(format)?;
        Ok(Self(tc::Quantized::from_ggml(format, &blocks.0, dtype.map_or(tc::DType::F32, |dtype| dtype.0))?))
    }

    /// The shape: (rows, columns).
    #[getter]
    fn shape(&self) -> Sizes<'_> {
        Sizes(self.0.dims())
    }

    /// The dtype of the values that the matrix represents.
    #[getter]
    fn dtype(&self) -> DType {
        DType::new(self.0.dtype())
    }

    /// The device, such as "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        device::name(self.0.device())
    }

    /// The name of the format: "int8", "fp8", "nf4", or a block format of ggml, such as "q8_0" or "q4_k".
    #[getter]
    fn format(&self) -> &'static str {
        self.0.format().name()
    }

    /// The number of bytes of the codes and scales.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    /// Return the number of elements.
    fn numel(&self) -> usize {
        self.0.dims().iter().product()
    }

    /// Return the values that the codes and scales represent, computed in f32 and rounded once.
    ///
    /// Args:
    ///     dtype: the dtype of the result; default: the dtype of the matrix.
    ///
    /// Raises:
    ///     DTypeError: if the dtype is not floating point.
    ///     OutOfMemoryError: if the values do not fit into memory.
    #[pyo3(signature = (dtype=None))]
    fn dequantize(&self, py: Python<'_>, dtype: Option<DTypeArg>) -> Result<Tensor> {
        let dtype = dtype.map_or_else(|| self.0.dtype(), |dtype| dtype.0);
        compute(py, self.numel(), || self.0.dequantize(dtype)).map(Tensor)
    }

    /// Return a dict of the tensors that store the matrix: "codes" (u8) and "scales" (f32). A matrix in "nf4" also has
    /// "scale_codes" (u8) and "offset" (f32), because its scales are quantized too. A matrix of ggml blocks has only
    /// "codes": its blocks contain the scales.
    fn tensors<'py>(&self, py: Python<'py>) -> Result<NamedTensors<'py>> {
        let dict = PyDict::new(py);
        // The core returns one set of tensors for each matrix that was joined into this one. Only models join matrices,
        // so a matrix that is made in Python has one set.
        for (name, tensor) in self.0.tensors()?.into_iter().flatten() {
            dict.set_item(name, Bound::new(py, Tensor(tensor))?)?;
        }
        Ok(NamedTensors(dict))
    }

    /// Return the same matrix on another device.
    ///
    /// Raises:
    ///     DeviceError, CudaUnavailableError: if the device is unknown or cannot be used.
    ///     OutOfMemoryError: if the copy does not fit into memory.
    fn to(&self, py: Python<'_>, device: DeviceArg) -> Result<Self> {
        compute(py, self.numel(), || self.0.to_device(&device.0)).map(Self)
    }

    fn __repr__(&self) -> String {
        let [rows, columns] = [self.0.dims()[0], self.0.dims()[1]];
        let (format, dtype, device) = (self.format(), self.0.dtype().as_str(), self.device());
        let device = if device == "cpu" { String::new() } else { format!(", device=\"{device}\"") };
        format!("QuantizedTensor({rows} x {columns}, \"{format}\", {dtype}, {} bytes{device})", self.0.bytes())
    }
}

/// Quantize a frozen matrix.
///
/// ```python
/// weight = tc.randn(64, 128)
/// quantized = tc.quantize(weight, "nf4")
/// assert (quantized.dequantize() - weight).abs().mean().item() < 0.1
/// ```
///
/// Args:
///     tensor: floating point, (out_features, in_features).
///     format: "int8" for integers with a scale per row; "fp8" for e4m3 numbers with a scale per row; "nf4" for four
///         bits as in bitsandbytes, with a scale per block of 64 elements, where each block of 256 scales is quantized
///         too; "q8_0" or "q4_0" for blocks of 32 elements of a row, each block with a scale, as in GGUF files.
///
/// Raises:
///     ShapeError: if the tensor is not a matrix, or for "q8_0" and "q4_0", if a row does not consist of whole blocks.
///     DTypeError: if the tensor is not floating point.
///     ArgumentError: if the format is unknown or only `from_blocks` supports it, or if the tensor requires a gradient
///         or has values that are non-finite or too large for the format.
#[pyfunction]
pub fn quantize(py: Python<'_>, tensor: &Tensor, format: &str) -> Result<QuantizedTensor> {
    let format = format.parse()?;
    reading(py, &tensor.0, || tc::Quantized::new(&tensor.0, format)).map(QuantizedTensor)
}

/// The argument `weight` of an operation: a tensor or a quantized matrix.
pub enum WeightArg<'py> {
    Plain(PyRef<'py, Tensor>),
    Quantized(PyRef<'py, QuantizedTensor>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for WeightArg<'py> {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(Tensor::TYPE_HINT, QuantizedTensor::TYPE_HINT);

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(quantized) = object.cast::<QuantizedTensor>() {
            return Ok(Self::Quantized(quantized.to_owned().borrow()));
        }
        // Any other argument raises the error for an argument that is not a tensor.
        Ok(Self::Plain(object.cast::<Tensor>()?.to_owned().borrow()))
    }
}

impl WeightArg<'_> {
    /// The weight in the type that the core's operations take.
    pub fn get(&self) -> tc::WeightRef<'_> {
        match self {
            Self::Plain(tensor) => (&tensor.0).into(),
            Self::Quantized(quantized) => (&quantized.0).into(),
        }
    }
}
