//! Reductions and softmax.

use pyo3::prelude::*;
use trainable_candle_core as tc;

use super::Tensor;
use crate::argument::Argument;
use crate::arguments::{Dims, Integer};
use crate::call::compute;
use crate::error::Result;

/// The dimensions that the caller gave as `dim` (torch's name) or `axis` (numpy's name); an error if it gave both.
fn dim_or_axis(op: &'static str, dim: Option<Dims>, axis: Option<Dims>) -> Result<Option<Dims>> {
    match (dim, axis) {
        (Some(_), Some(_)) => {
            Err(tc::Error::argument(op, "found both dim and axis, which mean the same; give only one").into())
        }
        (dim, axis) => Ok(dim.or(axis)),
    }
}

/// The indices of the dimensions to reduce: those in `dim`, or all dimensions if `dim` is `None`.
fn dims_or_all(op: &'static str, tensor: &tc::Tensor, dim: Option<&Dims>) -> Result<Vec<usize>> {
    dim.map_or_else(|| Ok((0..tensor.rank()).collect()), |dims| dims.resolve(op, tensor.rank()))
}

/// Define methods that reduce over one, several or all dimensions. An entry has the method's name, the first paragraph
/// of its docstring, and optionally a further line of the section `Raises`.
macro_rules! reductions {
    ($($name:ident $doc:literal $(raises $raises:literal)?;)*) => {
        #[pymethods]
        impl Tensor {
            $(
                #[doc = $doc]
                ///
                /// Args:
                ///     dim: the dimension or dimensions to reduce; default all.
                ///     keepdim: whether the result keeps the reduced dimensions, with size 1.
                ///     axis: another name of `dim`.
                ///
                /// Raises:
                ///     IndexOutOfRangeError: if a dimension is out of range.
                ///     ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
                $(#[doc = $raises])?
                #[pyo3(signature = (dim=None, keepdim=false, *, axis=None))]
                fn $name(&self, py: Python<'_>, dim: Option<Dims>, keepdim: bool, axis: Option<Dims>) -> Result<Self> {
                    let dim = dim_or_axis(stringify!($name), dim, axis)?;
                    let dims = dims_or_all(stringify!($name), &self.0, dim.as_ref())?;
                    // `compute` releases the GIL if there are many elements.
                    compute(py, self.0.elem_count(), || self.0.$name(&dims, keepdim)).map(Self)
                }
            )*
        }
    };
}

reductions! {
    sum "Return the sum. The sum of an integer tensor, such as a mask, is in i64.";
    mean "Return the mean." raises "    DTypeError: if the tensor is not floating point.";
    logsumexp "Return the logarithm of the sum of exponentials, without overflow."
        raises "    DTypeError: if the tensor is not floating point.";
}

/// Reshape `result`, the one element to which all dimensions of `tensor` were reduced: without `keepdim` to no
/// dimensions, with `keepdim` to as many dimensions as `tensor` has.
fn shaped_as_full_reduction(tensor: &tc::Tensor, result: &tc::Tensor, keepdim: bool) -> tc::Result<tc::Tensor> {
    result.reshape(if keepdim { vec![1; tensor.rank()] } else { Vec::new() })
}

#[pymethods]
impl Tensor {
    /// Return the largest element. NaN counts as the largest. With one dimension in `dim`, the first of equal elements
    /// gets the gradient; with several dimensions or without `dim`, equal elements share the gradient equally.
    ///
    /// Args:
    ///     dim: the dimension or dimensions to reduce; default all.
    ///     keepdim: whether the result keeps the reduced dimensions, with size 1.
    ///     axis: another name of `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    ///     ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
    ///     ShapeError: if a reduced dimension has the size 0.
    #[pyo3(signature = (dim=None, keepdim=false, *, axis=None))]
    fn max(&self, py: Python<'_>, dim: Option<Dims>, keepdim: bool, axis: Option<Dims>) -> Result<Self> {
        let dims = dim_or_axis("max", dim, axis)?.map(|dim| dim.resolve("max", self.0.rank())).transpose()?;
        compute(py, self.0.elem_count(), || match dims {
            Some(dims) => self.0.max(&dims, keepdim),
            None => shaped_as_full_reduction(&self.0, &self.0.max_all()?, keepdim),
        })
        .map(Self)
    }

    /// Return the smallest element. NaN counts as the smallest. Equal elements get gradients as in `max`.
    ///
    /// Args:
    ///     dim: the dimension or dimensions to reduce; default all.
    ///     keepdim: whether the result keeps the reduced dimensions, with size 1.
    ///     axis: another name of `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    ///     ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
    ///     ShapeError: if a reduced dimension has the size 0.
    #[pyo3(signature = (dim=None, keepdim=false, *, axis=None))]
    fn min(&self, py: Python<'_>, dim: Option<Dims>, keepdim: bool, axis: Option<Dims>) -> Result<Self> {
        let dims = dim_or_axis("min", dim, axis)?.map(|dim| dim.resolve("min", self.0.rank())).transpose()?;
        compute(py, self.0.elem_count(), || match dims {
            Some(dims) => self.0.min(&dims, keepdim),
            None => shaped_as_full_reduction(&self.0, &self.0.min_all()?, keepdim),
        })
        .map(Self)
    }

    /// Return the variance: the sum of the squared deviations from the mean, divided by n - `correction`, where n is
    /// the number of elements in the sum.
    ///
    /// Args:
    ///     dim: the dimension or dimensions to reduce; default all.
    ///     keepdim: whether the result keeps the reduced dimensions, with size 1.
    ///     correction: 1 for the unbiased estimate (torch's default), 0 for numpy's default.
    ///     unbiased: if given, it replaces `correction`: True means 1, False means 0.
    ///     axis: another name of `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    ///     ArgumentError: if a dimension is given twice, or both `dim` and `axis` are given.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (dim=None, keepdim=false, *, correction=Argument::of(1.0), unbiased=None, axis=None))]
    fn var(
        &self,
        py: Python<'_>,
        dim: Option<Dims>,
        keepdim: bool,
        correction: Argument<f64>,
        unbiased: Option<bool>,
        axis: Option<Dims>,
    ) -> Result<Self> {
        let correction = correction.get("var", "correction")?;
        let correction = unbiased.map_or(correction, |unbiased| if unbiased { 1.0 } else { 0.0 });
        let dims = dims_or_all("var", &self.0, dim_or_axis("var", dim, axis)?.as_ref())?;
        compute(py, self.0.elem_count(), || self.0.var(&dims, keepdim, correction)).map(Self)
    }

    /// Return the index of the largest element, in i64. If several elements are largest, return the index of the first
    /// of them. NaN counts as the largest. The result has no gradient.
    ///
    /// Args:
    ///     dim: the dimension to reduce; by default, the result is the index in the flattened tensor.
    ///     keepdim: whether the result keeps the reduced dimensions, with size 1.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the dimension is out of range.
    ///     ShapeError: if a reduced dimension has the size 0.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (dim=None, keepdim=false))]
    fn argmax(&self, py: Python<'_>, dim: Option<Integer>, keepdim: bool) -> Result<Self> {
        let tensor = self.0.detach();
        let dim = dim.map(|dim| dim.dim("argmax", tensor.rank())).transpose()?;
        compute(py, tensor.elem_count(), || {
            let index = match dim {
                Some(dim) => tensor.argmax(dim, keepdim)?,
                None => {
                    let flat = tensor.reshape(tensor.elem_count())?;
                    shaped_as_full_reduction(&tensor, &flat.argmax(0, /* keepdim */ false)?, keepdim)?
                }
            };
            // The core returns u32, but the indices that Python gets are i64, as in torch.
            index.to_dtype(candle_core::DType::I64)
        })
        .map(Self)
    }

    /// Return exp(x) / sum(exp(x)) for each element x, with the sum along `dim`. It does not overflow.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the dimension is out of range.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (dim=Integer::of(-1)))]
    fn softmax(&self, py: Python<'_>, dim: Integer) -> Result<Self> {
        let dim = dim.dim("softmax", self.0.rank())?;
        compute(py, self.0.elem_count(), || self.0.softmax(dim)).map(Self)
    }

    /// Return the logarithm of `softmax`. It neither overflows nor underflows.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the dimension is out of range.
    ///     DTypeError: if the tensor is not floating point.
    #[pyo3(signature = (dim=Integer::of(-1)))]
    fn log_softmax(&self, py: Python<'_>, dim: Integer) -> Result<Self> {
        let dim = dim.dim("log_softmax", self.0.rank())?;
        compute(py, self.0.elem_count(), || self.0.log_softmax(dim)).map(Self)
    }

    /// Return the cumulative sum along `dim`: element i of the result is the sum of the elements 0 to i, both included.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the dimension is out of range.
    ///     DTypeError: if the tensor is not floating point.
    fn cumsum(&self, py: Python<'_>, dim: Integer) -> Result<Self> {
        let dim = dim.dim("cumsum", self.0.rank())?;
        compute(py, self.0.elem_count(), || self.0.cumsum(dim)).map(Self)
    }
}
