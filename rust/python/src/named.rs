//! Result types for dicts of tensors or variables by name, with their type annotations for the Python stubs.

use std::convert::Infallible;

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript};
use trainable_candle_core as tc;

use crate::error::Result;
use crate::tensor::Tensor;
use crate::var::Var;

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
    /// A dict with these names and tensors.
    pub fn new(py: Python<'py>, tensors: impl IntoIterator<Item = (String, tc::Tensor)>) -> Result<Self> {
        let dict = PyDict::new(py);
        for (name, tensor) in tensors {
            dict.set_item(name, Bound::new(py, Tensor(tensor))?)?;
        }
        Ok(Self(dict))
    }
}
