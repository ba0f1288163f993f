//! Wrappers of results, which determine the type annotations of the results in the Python stubs.

use std::convert::Infallible;

use pyo3::inspect::{PyStaticConstant, PyStaticExpr};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{type_hint_identifier, type_hint_subscript};

/// The `...` in an annotation such as `tuple[int, ...]`.
pub const ELLIPSIS: PyStaticExpr = PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis };

const INT: PyStaticExpr = type_hint_identifier!("builtins", "int");

/// A tensor's shape, which Python gets as a tuple; annotated as `tuple[int, ...]`.
pub struct Sizes<'a>(pub &'a [usize]);

impl<'py> IntoPyObject<'py> for Sizes<'_> {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_subscript!(type_hint_identifier!("builtins", "tuple"), INT, ELLIPSIS);

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        PyTuple::new(py, self.0)
    }
}

/// A numpy array, annotated as `NDArray[Any]`.
pub struct NdArray<'py>(pub Bound<'py, PyAny>);

impl<'py> IntoPyObject<'py> for NdArray<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr =
        type_hint_subscript!(type_hint_identifier!("numpy.typing", "NDArray"), type_hint_identifier!("typing", "Any"));

    fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

/// A value of any Python type, annotated as `Any`.
pub struct Anything<'py>(pub Bound<'py, PyAny>);

impl<'py> IntoPyObject<'py> for Anything<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn into_pyobject(self, _: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

impl<'py> From<Bound<'py, PyList>> for Anything<'py> {
    fn from(list: Bound<'py, PyList>) -> Self {
        Self(list.into_any())
    }
}
