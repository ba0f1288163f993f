//! Argument and result types that carry their Python annotation.

use std::convert::Infallible;

use pyo3::inspect::{PyStaticConstant, PyStaticExpr};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList, PyTuple};
use pyo3::{PyTypeInfo, type_hint_identifier, type_hint_subscript, type_hint_union};
use trainable_candle_core as tc;

use crate::error::Result;
use crate::tensor::Tensor;
use crate::var::Var;

/// `...` in an annotation.
pub const ELLIPSIS: PyStaticExpr = PyStaticExpr::Constant { value: PyStaticConstant::Ellipsis };

const INT: PyStaticExpr = type_hint_identifier!("builtins", "int");
const INTS: PyStaticExpr = type_hint_subscript!(type_hint_identifier!("collections.abc", "Sequence"), INT);
const INT_OR_INTS: PyStaticExpr = type_hint_union!(INT, INTS);

/// The position of dimension `dim` (negative counts from the end) among `rank` dimensions.
pub fn resolve_dim(op: &'static str, dim: isize, rank: usize) -> tc::Result<usize> {
    let resolved = if dim < 0 { dim + rank as isize } else { dim };
    if (0..rank as isize).contains(&resolved) {
        return Ok(resolved as usize);
    }
    let expected = if rank == 0 {
        "a tensor without dimensions has none".to_owned()
    } else {
        format!("expected {} to {} for a tensor of {rank} dimensions", -(rank as isize), rank - 1)
    };
    Err(tc::Error::index(op, format!("dimension {dim} is out of range; {expected}")))
}

/// An integer, or a sequence of integers.
fn integers(object: &Bound<'_, PyAny>) -> PyResult<Vec<isize>> {
    match object.extract::<isize>() {
        Ok(one) => Ok(vec![one]),
        Err(_) => object.extract::<Vec<isize>>(),
    }
}

/// One dimension or several.
pub struct Dims(Vec<isize>);

impl Dims {
    /// The positions, each once.
    pub fn resolve(&self, op: &'static str, rank: usize) -> tc::Result<Vec<usize>> {
        let mut dims = Vec::with_capacity(self.0.len());
        for &dim in &self.0 {
            let resolved = resolve_dim(op, dim, rank)?;
            if dims.contains(&resolved) {
                return Err(tc::Error::argument(op, format!("dimension {dim} was given twice")));
            }
            dims.push(resolved);
        }
        Ok(dims)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Dims {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        integers(&object).map(Self)
    }
}

/// A shape: the sizes of the dimensions.
pub struct Shape(pub Vec<isize>);

impl Shape {
    /// The shape in `f(2, 3)`, `f((2, 3))` or `f([2, 3])`.
    pub fn from_arguments(arguments: &Bound<'_, PyTuple>) -> Result<Self> {
        if arguments.len() == 1 {
            return Ok(Self(integers(&arguments.get_item(0)?)?));
        }
        Ok(Self(arguments.extract()?))
    }

    /// The sizes, none negative.
    pub fn sizes(&self, op: &'static str) -> tc::Result<Vec<usize>> {
        let negative = |size: isize| tc::Error::shape(op, format!("negative size {size} in shape {:?}", self.0));
        self.0.iter().map(|&size| usize::try_from(size).map_err(|_| negative(size))).collect()
    }

    /// The sizes with one -1 replaced by what `elements` leave for it.
    pub fn infer(&self, op: &'static str, elements: usize) -> tc::Result<Vec<usize>> {
        let Some(unknown) = self.0.iter().position(|&size| size == -1) else { return self.sizes(op) };
        let mut known = self.0.clone();
        known.remove(unknown);
        if known.contains(&-1) {
            return Err(tc::Error::shape(op, format!("only one size can be -1, found shape {:?}", self.0)));
        }
        let mut sizes = Self(known).sizes(op)?;
        let product = sizes.iter().try_fold(1usize, |n, &s| n.checked_mul(s)).unwrap_or(usize::MAX);
        if product == 0 || !elements.is_multiple_of(product) {
            return Err(tc::Error::shape(op, format!("{elements} elements do not fill shape {:?}", self.0)));
        }
        sizes.insert(unknown, elements / product);
        Ok(sizes)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Shape {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = INT_OR_INTS;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        integers(&object).map(Self)
    }
}

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
