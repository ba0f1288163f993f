//! Methods that change the shape of tensors, join tensors or split them.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use trainable_candle_core as tc;

use super::Tensor;
use crate::arguments::{Dims, Integer, Sections, Shape, sizes};
use crate::call::{catch_panics, compute};
use crate::error::Result;

#[pymethods]
impl Tensor {
    /// Return the same elements, in row-major order, in another shape. The result is a view if this tensor is
    /// contiguous, and a copy otherwise.
    ///
    /// Args:
    ///     shape: the sizes, as arguments or one sequence. One size may be -1: it is computed from the number of
    ///         elements.
    ///
    /// Raises:
    ///     ShapeError: if the tensor does not have as many elements as `shape`, or `shape` has a negative size other
    ///         than one -1.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn reshape(&self, py: Python<'_>, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let sizes = Shape::from_arguments(shape)?.infer("reshape", self.0.elem_count())?;
        // The number of elements to copy: the reshape copies unless they are contiguous. `compute` releases the GIL if
        // the work is long.
        let work = if self.0.raw().is_contiguous() { 0 } else { self.0.elem_count() };
        compute(py, work, || self.0.reshape(sizes)).map(Self)
    }

    /// Another name of `reshape`, as in torch. Unlike in torch, the result may be a copy.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn view(&self, py: Python<'_>, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        self.reshape(py, shape)
    }

    /// Merge the dimensions from `start_dim` to `end_dim`, both included, into one dimension. A tensor without
    /// dimensions becomes a vector of one element.
    ///
    /// Raises:
    ///     ArgumentError: if `start_dim` comes after `end_dim`.
    ///     IndexOutOfRangeError: if a dimension is out of range.
    #[pyo3(signature = (start_dim=Integer::of(0), end_dim=Integer::of(-1)))]
    fn flatten(&self, py: Python<'_>, start_dim: Integer, end_dim: Integer) -> Result<Self> {
        let dims = self.0.dims();
        if dims.is_empty() {
            return catch_panics(|| self.0.reshape(1)).map(Self);
        }
        let (start, end) = (start_dim.dim("flatten", dims.len())?, end_dim.dim("flatten", dims.len())?);
        if start > end {
            return Err(tc::Error::argument("flatten", format!("start_dim {start} comes after end_dim {end}")).into());
        }
        let mut sizes = dims[..start].to_vec();
        sizes.push(dims[start..=end].iter().product());
        sizes.extend_from_slice(&dims[end + 1..]);
        // As in `reshape`.
        let work = if self.0.raw().is_contiguous() { 0 } else { self.0.elem_count() };
        compute(py, work, || self.0.reshape(sizes)).map(Self)
    }

    /// Reorder the dimensions: dimension i of the result is dimension `dims[i]` of this tensor.
    ///
    /// Args:
    ///     dims: the dimensions in the new order, as arguments or one sequence.
    ///
    /// Raises:
    ///     ShapeError: if `dims` does not have all dimensions.
    ///     ArgumentError: if a dimension is given twice.
    ///     IndexOutOfRangeError: if a dimension is out of range.
    #[pyo3(signature = (*dims: "int | tuple[int, ...] | list[int]"))]
    fn permute(&self, dims: &Bound<'_, PyTuple>) -> Result<Self> {
        let order = Dims::from_arguments(dims)?.resolve("permute", self.0.rank())?;
        catch_panics(|| self.0.permute(&order)).map(Self)
    }

    /// Swap two dimensions.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    fn transpose(&self, dim0: Integer, dim1: Integer) -> Result<Self> {
        let rank = self.0.rank();
        let (a, b) = (dim0.dim("transpose", rank)?, dim1.dim("transpose", rank)?);
        catch_panics(|| self.0.transpose(a, b)).map(Self)
    }

    /// A view with the dimensions in reverse order; the transpose, if the tensor is a matrix.
    #[getter(T)]
    fn reversed_dims(&self) -> Result<Self> {
        let order: Vec<usize> = (0..self.0.rank()).rev().collect();
        catch_panics(|| self.0.permute(&order)).map(Self)
    }

    /// Insert a dimension of size 1. `dim` is the index of this dimension in the result.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if `dim` is out of range.
    fn unsqueeze(&self, dim: Integer) -> Result<Self> {
        let dim = dim.dim("unsqueeze", self.0.rank() + 1)?;
        catch_panics(|| self.0.unsqueeze(dim)).map(Self)
    }

    /// Remove the dimensions of size 1. If `dim` is given, remove only those of the dimensions in `dim`.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a dimension is out of range.
    ///     ArgumentError: if a dimension is given twice.
    #[pyo3(signature = (dim=None))]
    fn squeeze(&self, dim: Option<Dims>) -> Result<Self> {
        let mut dims = match dim {
            Some(dims) => dims.resolve("squeeze", self.0.rank())?,
            None => (0..self.0.rank()).collect(),
        };
        dims.sort_unstable();
        // Begin with the last dimension, because the removal of a dimension changes the indices of those after it.
        catch_panics(|| dims.iter().rev().try_fold(self.0.clone(), |tensor, &dim| tensor.squeeze(dim))).map(Self)
    }

    /// Return a view of shape `shape`. The elements repeat along dimensions that have size 1 in this tensor, and along
    /// new leading dimensions.
    ///
    /// Raises:
    ///     ShapeError: if this tensor's shape does not broadcast to `shape`, or a size is negative.
    ///     OutOfMemoryError: if a tensor of shape `shape` without repeated elements would not fit into memory.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn broadcast_to(&self, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let sizes = Shape::from_arguments(shape)?.sizes("broadcast_to")?;
        catch_panics(|| self.0.broadcast_as(sizes)).map(Self)
    }

    /// Return the same as `broadcast_to`, but the size -1 means the size of this tensor's dimension, as in torch.
    ///
    /// Raises:
    ///     ShapeError: if this tensor's shape does not broadcast to `shape`, a new leading dimension has the size -1,
    ///         or a size is less than -1.
    ///     OutOfMemoryError: as for `broadcast_to`.
    #[pyo3(signature = (*shape: "int | tuple[int, ...] | list[int]"))]
    fn expand(&self, shape: &Bound<'_, PyTuple>) -> Result<Self> {
        let mut shape = Shape::from_arguments(shape)?.numbers("expand")?;
        // The number of new leading dimensions. If `shape` has too few dimensions, `broadcast_as` returns the error.
        let offset = shape.len().wrapping_sub(self.0.rank());
        // For a new leading dimension, `position - offset` wraps around, and this tensor has no such dimension: a size
        // of -1 stays, for which `sizes` returns the error.
        for (position, size) in shape.iter_mut().enumerate() {
            if let (-1, Some(&current)) = (*size, self.0.dims().get(position.wrapping_sub(offset))) {
                *size = current as i64;
            }
        }
        let sizes = sizes("expand", &shape)?;
        catch_panics(|| self.0.broadcast_as(sizes)).map(Self)
    }

    /// Return a view of the `length` slices along `dim` from index `start` on.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if `dim` is out of range, or `start + length` is more than the size of the dimension.
    ///     ArgumentError: if `start` or `length` is negative.
    fn narrow(&self, dim: Integer, start: Integer, length: Integer) -> Result<Self> {
        let dim = dim.dim("narrow", self.0.rank())?;
        let (start, length) = (start.count("narrow", "start")?, length.count("narrow", "length")?);
        catch_panics(|| self.0.narrow(dim, start, length)).map(Self)
    }

    /// Split the tensor along `dim` into views. If this tensor has the size n along `dim`, each view has the size
    /// ceil(n / `chunks`). As in torch, the last view may be smaller, and there may be fewer than `chunks` views.
    ///
    /// Raises:
    ///     ArgumentError: if `chunks` is less than 1.
    ///     IndexOutOfRangeError: if the dimension is out of range.
    #[pyo3(signature = (chunks, dim=Integer::of(0)))]
    fn chunk(&self, chunks: Integer, dim: Integer) -> Result<Vec<Self>> {
        let dim = dim.dim("chunk", self.0.rank())?;
        let chunks = chunks.count("chunk", "chunks")?;
        Ok(catch_panics(|| self.0.chunk(chunks, dim))?.into_iter().map(Self).collect())
    }

    /// Split the tensor along `dim` into views.
    ///
    /// Args:
    ///     split_size_or_sections: one size along `dim` for all views (the last view may be smaller), or a list with
    ///         the size of each view.
    ///     dim: the dimension.
    ///
    /// Raises:
    ///     ShapeError: if the sizes in the list do not add up to the size of the dimension.
    ///     ArgumentError: if a size is negative, or the one size for all views is 0.
    ///     IndexOutOfRangeError: if the dimension is out of range.
    #[pyo3(signature = (split_size_or_sections, dim=Integer::of(0)))]
    fn split(&self, split_size_or_sections: Sections, dim: Integer) -> Result<Vec<Self>> {
        let dim = dim.dim("split", self.0.rank())?;
        let lengths = split_size_or_sections.lengths("split", "split_size_or_sections", self.0.dims()[dim])?;
        Ok(catch_panics(|| self.0.split(&lengths, dim))?.into_iter().map(Self).collect())
    }
}

fn references<'a>(tensors: &'a [PyRef<'_, Tensor>]) -> Vec<&'a tc::Tensor> {
    tensors.iter().map(|tensor| &tensor.0).collect()
}

/// Concatenate tensors along `dim`. The sizes of all other dimensions must agree.
///
/// ```python
/// assert tc.cat([tc.zeros(2, 3), tc.ones(1, 3)]).shape == (3, 3)
/// ```
///
/// Raises:
///     ArgumentError: if there are no tensors.
///     ShapeError: if the numbers of dimensions differ, or the sizes of another dimension than `dim`.
///     DTypeError: if the dtypes differ.
///     IndexOutOfRangeError: if the dimension is out of range.
///     OutOfMemoryError: if the result does not fit into memory.
#[pyfunction]
#[pyo3(signature = (tensors, dim=Integer::of(0)))]
pub fn cat(py: Python<'_>, tensors: Vec<PyRef<'_, Tensor>>, dim: Integer) -> Result<Tensor> {
    let tensors = references(&tensors);
    // Without tensors, `dim` does not matter, because `cat` returns an error.
    let dim = tensors.first().map_or(Ok(0), |first| dim.dim("cat", first.rank()))?;
    compute(py, tensors.iter().map(|t| t.elem_count()).sum(), || tc::Tensor::cat(&tensors, dim)).map(Tensor)
}

/// Stack tensors of the same shape along a new dimension, which has the index `dim` in the result.
///
/// ```python
/// assert tc.stack([tc.zeros(3), tc.ones(3)]).shape == (2, 3)
/// ```
///
/// Raises:
///     ArgumentError: if there are no tensors.
///     ShapeError: if the shapes differ.
///     DTypeError: if the dtypes differ.
///     IndexOutOfRangeError: if the dimension is out of range.
///     OutOfMemoryError: if the result does not fit into memory.
#[pyfunction]
#[pyo3(signature = (tensors, dim=Integer::of(0)))]
pub fn stack(py: Python<'_>, tensors: Vec<PyRef<'_, Tensor>>, dim: Integer) -> Result<Tensor> {
    let tensors = references(&tensors);
    // Without tensors, `dim` does not matter, because `stack` returns an error.
    let dim = tensors.first().map_or(Ok(0), |first| dim.dim("stack", first.rank() + 1))?;
    compute(py, tensors.iter().map(|t| t.elem_count()).sum(), || tc::Tensor::stack(&tensors, dim)).map(Tensor)
}
