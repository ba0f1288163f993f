//! Views, joining and splitting.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use trainable_candle_core as tc;

use super::Tensor;
use crate::call::{compute, quick};
use crate::error::Result;
use crate::types::{Dims, Shape, resolve_dim};

#[pymethods]
impl Tensor {
    /// The same elements, in row-major order, in another shape. A view where the layout allows.
    ///
    /// Args:
    ///     shape: the sizes, as arguments or one sequence; one may be -1 and is worked out.
    ///
    /// Raises:
    ///     ShapeError: if the number of elements differs.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn reshape(&self, py: Python<'_>, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let sizes = Shape::from_arguments(shape)?.infer("reshape", self.0.elem_count())?;
        // Copies unless the elements lie in order.
        let work = if self.0.raw().is_contiguous() { 0 } else { self.0.elem_count() };
        compute(py, work, || self.0.reshape(sizes)).map(Self)
    }

    /// `reshape`, under torch's other name.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn view(&self, py: Python<'_>, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        self.reshape(py, shape)
    }

    /// Dimensions `start_dim` to `end_dim` made one.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    #[pyo3(signature = (start_dim=0, end_dim=-1))]
    fn flatten(&self, py: Python<'_>, start_dim: isize, end_dim: isize) -> Result<Self> {
        let dims = self.0.dims();
        if dims.is_empty() {
            return quick(|| self.0.reshape(1)).map(Self);
        }
        let (start, end) =
            (resolve_dim("flatten", start_dim, dims.len())?, resolve_dim("flatten", end_dim, dims.len())?);
        if start > end {
            return Err(
                tc::Error::argument("flatten", format!("start_dim {start_dim} comes after end_dim {end_dim}")).into()
            );
        }
        let mut sizes = dims[..start].to_vec();
        sizes.push(dims[start..=end].iter().product());
        sizes.extend_from_slice(&dims[end + 1..]);
        let work = if self.0.raw().is_contiguous() { 0 } else { self.0.elem_count() };
        compute(py, work, || self.0.reshape(sizes)).map(Self)
    }

    /// The dimensions in another order, given as arguments or one sequence.
    ///
    /// Raises:
    ///     ShapeError: if it is not a permutation of the dimensions.
    #[pyo3(signature = (*dims: "int | tuple[int, ...] | list[int]"))]
    fn permute(&self, dims: &Bound<'_, PyTuple>) -> Result<Self> {
        let order = Shape::from_arguments(dims)?.0;
        let order = order.into_iter().map(|dim| resolve_dim("permute", dim, self.0.rank()));
        let order = order.collect::<tc::Result<Vec<_>>>()?;
        quick(|| self.0.permute(&order)).map(Self)
    }

    /// Two dimensions swapped.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    fn transpose(&self, dim0: isize, dim1: isize) -> Result<Self> {
        let rank = self.0.rank();
        let (a, b) = (resolve_dim("transpose", dim0, rank)?, resolve_dim("transpose", dim1, rank)?);
        quick(|| self.0.transpose(a, b)).map(Self)
    }

    /// The dimensions in reverse order: the transpose of a matrix.
    #[getter(T)]
    fn reversed_dims(&self) -> Result<Self> {
        let order: Vec<usize> = (0..self.0.rank()).rev().collect();
        quick(|| self.0.permute(&order)).map(Self)
    }

    /// A new dimension of size 1 at position `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the position is out of range.
    fn unsqueeze(&self, dim: isize) -> Result<Self> {
        let dim = resolve_dim("unsqueeze", dim, self.0.rank() + 1)?;
        quick(|| self.0.unsqueeze(dim)).map(Self)
    }

    /// Without the dimensions of size 1: all, or those among `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    #[pyo3(signature = (dim=None))]
    fn squeeze(&self, dim: Option<Dims>) -> Result<Self> {
        let mut dims = match dim {
            Some(dims) => dims.resolve("squeeze", self.0.rank())?,
            None => (0..self.0.rank()).collect(),
        };
        dims.sort_unstable();
        quick(|| dims.iter().rev().try_fold(self.0.clone(), |tensor, &dim| tensor.squeeze(dim))).map(Self)
    }

    /// A view in which dimensions of size 1, and new leading ones, repeat up to `shape`.
    ///
    /// Raises:
    ///     ShapeError: if the shape is not reached by repeating.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn broadcast_to(&self, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let sizes = Shape::from_arguments(shape)?.sizes("broadcast_to")?;
        quick(|| self.0.broadcast_as(sizes)).map(Self)
    }

    /// `broadcast_to`, where -1 keeps a dimension's size (torch's name).
    ///
    /// Raises:
    ///     ShapeError: if the shape is not reached by repeating.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn expand(&self, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let mut shape = Shape::from_arguments(shape)?;
        let offset = shape.0.len().wrapping_sub(self.0.rank());
        for (position, size) in shape.0.iter_mut().enumerate() {
            if let (-1, Some(&own)) = (*size, self.0.dims().get(position.wrapping_sub(offset))) {
                *size = own as isize;
            }
        }
        let sizes = shape.sizes("expand")?;
        quick(|| self.0.broadcast_as(sizes)).map(Self)
    }

    /// A view of `length` elements from `start` along `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if the range is not inside the dimension.
    fn narrow(&self, dim: isize, start: usize, length: usize) -> Result<Self> {
        let dim = resolve_dim("narrow", dim, self.0.rank())?;
        quick(|| self.0.narrow(dim, start, length)).map(Self)
    }

    /// Views of `chunks` parts along `dim`, the last possibly smaller.
    ///
    /// Raises:
    ///     ArgumentError: if `chunks` is 0.
    ///     IndexOutOfRangeError: if the dimension is out of range.
    #[pyo3(signature = (chunks, dim=0))]
    fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<Self>> {
        let dim = resolve_dim("chunk", dim, self.0.rank())?;
        Ok(quick(|| self.0.chunk(chunks, dim))?.into_iter().map(Self).collect())
    }

    /// Views of parts along `dim`.
    ///
    /// Args:
    ///     split_size_or_sections: the size of all parts but the last, or the size of each.
    ///     dim: the dimension.
    ///
    /// Raises:
    ///     ShapeError: if the sizes do not add up to the dimension's.
    ///     ArgumentError: if the one size is 0.
    ///     IndexOutOfRangeError: if the dimension is out of range.
    #[pyo3(signature = (split_size_or_sections, dim=0))]
    fn split(&self, split_size_or_sections: Sections, dim: isize) -> Result<Vec<Self>> {
        let dim = resolve_dim("split", dim, self.0.rank())?;
        let lengths = match split_size_or_sections {
            Sections::Lengths(lengths) => lengths,
            Sections::Size(0) => {
                return Err(tc::Error::argument("split", "the size of a part must be at least 1, found 0").into());
            }
            Sections::Size(size) => {
                let total = self.0.dims()[dim];
                (0..total.max(1)).step_by(size).map(|start| size.min(total - start)).collect()
            }
        };
        Ok(quick(|| self.0.split(&lengths, dim))?.into_iter().map(Self).collect())
    }
}

/// The size of each part, or the sizes.
#[derive(FromPyObject)]
enum Sections {
    Size(usize),
    Lengths(Vec<usize>),
}

fn references<'a>(tensors: &'a [PyRef<'_, Tensor>]) -> Vec<&'a tc::Tensor> {
    tensors.iter().map(|tensor| &tensor.0).collect()
}

/// Tensors one after the other along `dim`; all other sizes must agree.
///
/// Raises:
///     ArgumentError: without tensors.
///     ShapeError: if the sizes do not agree.
///     DTypeError: if the dtypes differ.
///     IndexOutOfRangeError: if the dimension is out of range.
#[pyfunction]
#[pyo3(signature = (tensors, dim=0))]
pub fn cat(py: Python<'_>, tensors: Vec<PyRef<'_, Tensor>>, dim: isize) -> Result<Tensor> {
    let tensors = references(&tensors);
    let dim = tensors.first().map_or(Ok(0), |first| resolve_dim("cat", dim, first.rank()))?;
    compute(py, tensors.iter().map(|t| t.elem_count()).sum(), || tc::Tensor::cat(&tensors, dim)).map(Tensor)
}

/// Tensors of one shape along a new dimension `dim`.
///
/// Raises:
///     ArgumentError: without tensors.
///     ShapeError: if the shapes differ.
///     DTypeError: if the dtypes differ.
///     IndexOutOfRangeError: if the dimension is out of range.
#[pyfunction]
#[pyo3(signature = (tensors, dim=0))]
pub fn stack(py: Python<'_>, tensors: Vec<PyRef<'_, Tensor>>, dim: isize) -> Result<Tensor> {
    let tensors = references(&tensors);
    let dim = tensors.first().map_or(Ok(0), |first| resolve_dim("stack", dim, first.rank() + 1))?;
    compute(py, tensors.iter().map(|t| t.elem_count()).sum(), || tc::Tensor::stack(&tensors, dim)).map(Tensor)
}
