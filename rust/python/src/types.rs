//! Result types that carry their Python annotation.

use std::convert::Infallible;

use pyo3::inspect::{PyStaticConstant, PyStaticExpr};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList, PyTuple};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript};
use trainable_candle_core as tc;

use crate::error::Result;
use crate::models::Model;
use crate::tensor::Tensor;
use crate::var::Var;

/// `...` in an annotation.
pub const ELLIPSIS: PyStaticExpr = PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis };

const INT: PyStaticExpr = type_hint_identifier!("builtins", "int");
/// The shape of a tensor as a tuple.
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

/// A numpy array.
pub struct NdArray<'py>(pub Bound<'py, PyAny>);

impl<'py> IntoPyObject<'py> for NdArray<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr =
        type_hint_subscript!(type_hint_identifier!("numpy.typing", "NDArray"), type_hint_identifier!("typing", "Any"));

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
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

/// A value of any Python type: a number, or nested lists of numbers.
pub struct Anything<'py>(pub Bound<'py, PyAny>);

impl<'py> IntoPyObject<'py> for Anything<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing", "Any");

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

impl<'py> From<Bound<'py, PyList>> for Anything<'py> {
    fn from(list: Bound<'py, PyList>) -> Self {
        Self(list.into_any())
    }
}

const STR: PyStaticExpr = type_hint_identifier!("builtins", "str");
const DICT: PyStaticExpr = type_hint_identifier!("builtins", "dict");

/// A dict from names to variables.
pub struct NamedVars<'py>(pub Bound<'py, PyDict>);

impl<'py> IntoPyObject<'py> for NamedVars<'py> {
    type Target = PyDict;
    type Output = Bound<'py, PyDict>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_subscript!(DICT, STR, Var::TYPE_HINT);

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

/// A dict from names to tensors.
pub struct NamedTensors<'py>(pub Bound<'py, PyDict>);

impl<'py> IntoPyObject<'py> for NamedTensors<'py> {
    type Target = PyDict;
    type Output = Bound<'py, PyDict>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_subscript!(DICT, STR, Tensor::TYPE_HINT);

    fn into_pyobject(self, _: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0)
    }
}

impl<'py> NamedTensors<'py> {
    /// The dict of named tensors.
    pub fn new(py: Python<'py>, tensors: impl IntoIterator<Item = (String, tc::Tensor)>) -> Result<Self> {
        let dict = PyDict::new(py);
        for (name, tensor) in tensors {
            dict.set_item(name, Bound::new(py, Tensor(tensor))?)?;
        }
        Ok(Self(dict))
    }
}

/// An object of the class that a class method was called on.
pub struct Own(pub Py<Model>);

impl<'py> IntoPyObject<'py> for Own {
    type Target = Model;
    type Output = Bound<'py, Model>;
    type Error = Infallible;
    const OUTPUT_TYPE: PyStaticExpr = type_hint_identifier!("typing_extensions", "Self");

    fn into_pyobject(self, py: Python<'py>) -> std::result::Result<Self::Output, Self::Error> {
        Ok(self.0.into_bound(py))
    }
}
