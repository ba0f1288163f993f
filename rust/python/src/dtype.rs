//! Dtypes in Python, and their names.

use candle_core::DType as CoreDType;
use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_union};
use trainable_candle_core as tc;

use crate::error::{Error, Result};

/// Every supported dtype, with its name in this library and its other names: those of torch and numpy.
const NAMES: [(CoreDType, &str, &[&str]); 7] = [
    (CoreDType::F32, "f32", &["float32", "float"]),
    (CoreDType::F16, "f16", &["float16", "half"]),
    (CoreDType::BF16, "bf16", &["bfloat16"]),
    (CoreDType::F64, "f64", &["float64", "double"]),
    (CoreDType::U8, "u8", &["uint8"]),
    (CoreDType::U32, "u32", &["uint32"]),
    (CoreDType::I64, "i64", &["int64", "long"]),
];

/// The dtype with the name `text`, which may begin with "torch.".
fn parse(text: &str) -> Option<CoreDType> {
    let text = text.strip_prefix("torch.").unwrap_or(text);
    NAMES.iter().find(|(_, name, others)| *name == text || others.contains(&text)).map(|(dtype, ..)| *dtype)
}

/// The error for an argument that is no dtype; `found` describes it.
#[cold]
fn unknown(found: &str) -> Error {
    tc::Error::dtype(
        "dtype",
        format!(
            "unknown dtype {found}; expected one of {}, or torch's name of one of these",
            NAMES.map(|(_, name, _)| name).join(", ")
        ),
    )
    .into()
}

/// The type of a tensor's elements.
///
/// A dtype is equal to each of its names: if `t.dtype == tc.bfloat16`, also `t.dtype == "bf16"` and
/// `t.dtype == "bfloat16"`. A name works wherever a dtype is expected.
///
/// ```python
/// dtype = tc.zeros(2).dtype
/// assert dtype == tc.float32 == "f32"
/// assert tc.zeros(2).to(tc.bfloat16).dtype == "bf16"
/// ```
///
/// Args:
///     name: "f32", "f16", "bf16", "f64", "u8", "u32" or "i64", or torch's name ("float32", "bfloat16", ...).
///
/// Raises:
///     DTypeError: if the name is unknown.
#[pyclass(frozen, module = "trainable_candle")]
#[derive(Clone, Copy)]
pub struct DType(CoreDType);

impl DType {
    pub const fn new(dtype: CoreDType) -> Self {
        Self(dtype)
    }

    pub fn short_name(self) -> &'static str {
        self.0.as_str()
    }
}

#[pymethods]
impl DType {
    #[new]
    fn py_new(name: DTypeArg) -> Self {
        Self(name.0)
    }

    /// The short name, such as "bf16".
    #[getter]
    fn name(&self) -> &'static str {
        self.0.as_str()
    }

    /// The number of bytes of one element.
    #[getter]
    fn itemsize(&self) -> usize {
        self.0.size_in_bytes()
    }

    /// Whether this dtype is floating point. Only floating-point tensors can have gradients.
    #[getter]
    fn is_floating_point(&self) -> bool {
        tc::raw::is_float(self.0)
    }

    fn __str__(&self) -> &'static str {
        self.0.as_str()
    }

    fn __repr__(&self) -> String {
        format!("DType(\"{}\")", self.0.as_str())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        if let Ok(other) = other.cast::<Self>() {
            return other.get().0 == self.0;
        }
        other.cast::<PyString>().ok().and_then(|text| text.to_str().ok().and_then(parse)) == Some(self.0)
    }

    /// Return the hash of the short name, so that `t.dtype` finds its entry in a dict such as `{"f32": ...}`.
    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyString::intern(py, self.0.as_str()).hash()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok(Reduced((py.get_type::<Self>(), (self.0.as_str(),)).into_pyobject(py)?))
    }
}

/// The tuple that `__reduce__` returns: a function and its arguments, with which `pickle` makes the object again.
pub struct Reduced<'py>(pub Bound<'py, PyTuple>);

impl<'py> IntoPyObject<'py> for Reduced<'py> {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = std::convert::Infallible;
    const OUTPUT_TYPE: PyStaticExpr = pyo3::type_hint_subscript!(
        type_hint_identifier!("builtins", "tuple"),
        type_hint_identifier!("typing", "Any"),
        crate::types::ELLIPSIS
    );

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

/// A dtype argument: a [`DType`], a name, or a dtype of numpy or torch.
#[derive(Clone, Copy)]
pub struct DTypeArg(pub CoreDType);

impl<'a, 'py> FromPyObject<'a, 'py> for DTypeArg {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_union!(DType::TYPE_HINT, type_hint_identifier!("builtins", "str"));

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(dtype) = object.cast::<DType>() {
            return Ok(Self(dtype.get().0));
        }
        if let Ok(text) = object.cast::<PyString>() {
            let text = text.to_str()?;
            return parse(text).map(Self).ok_or_else(|| unknown(&format!("\"{text}\"")).into());
        }
        foreign(&object).map(Self).map_err(Into::into)
    }
}

/// The dtype that an object of another library stands for: numpy's dtypes have a `name`, numpy's scalar types a
/// `__name__`, and torch's dtypes have their name as their `str()`.
fn foreign(object: &Bound<'_, PyAny>) -> Result<CoreDType> {
    let name = match object.getattr_opt("name")? {
        Some(name) => name,
        None => match object.getattr_opt("__name__")? {
            Some(name) if object.getattr("__module__")?.eq("numpy")? => name,
            _ => object.str()?.into_any(),
        },
    };
    let name = name.str()?;
    let text = name.to_str()?;
    parse(text).ok_or_else(|| unknown(text))
}
