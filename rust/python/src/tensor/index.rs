//! Indexing: `t[...]`, and the methods that select elements by tensors of indices.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PyInt, PySlice, PySliceMethods, PyTuple};
use tc::DType;
use trainable_candle_core as tc;

use super::convert::integers;
use super::{Tensor, to_raw};
use crate::arguments::Integer;
use crate::call::{catch_panics, compute};
use crate::error::Result;

const OP: &str = "index";

/// One entry of an index.
enum Item<'py> {
    Integer(i64),
    Slice(Bound<'py, PySlice>),
    NewDim,
    Ellipsis,
    /// A tensor of any shape with positions along one dimension of the indexed tensor.
    Positions(tc::Tensor),
    /// A mask with n dimensions, which applies to n neighbouring dimensions of the indexed tensor.
    Mask(tc::Tensor),
}

impl<'py> Item<'py> {
    fn parse(object: &Bound<'py, PyAny>) -> Result<Self> {
        if let Ok(slice) = object.cast::<PySlice>() {
            return Ok(Self::Slice(slice.clone()));
        }
        if object.is_none() {
            return Ok(Self::NewDim);
        }
        if object.is_instance_of::<PyEllipsis>() {
            return Ok(Self::Ellipsis);
        }
        if object.is_instance_of::<PyInt>() && !object.is_instance_of::<PyBool>() {
            return Ok(Self::Integer(object.extract::<Integer>()?.signed(OP, "a position")?));
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Self::from_tensor(tensor.get().0.detach());
        }
        if object.hasattr("__array__")? || object.is_instance_of::<pyo3::types::PyList>() {
            return Self::from_tensor(to_raw(OP, object, None)?.into());
        }
        if object.hasattr("__index__")? && !object.is_instance_of::<PyBool>() {
            return Ok(Self::Integer(object.extract::<Integer>()?.signed(OP, "a position")?));
        }
        let found = object.get_type().name()?;
        let message = format!(
            "cannot index with {found}; expected integers, slices, None, `...`, an integer tensor or a u8 mask"
        );
        Err(tc::Error::index(OP, message).into())
    }

    fn from_tensor(tensor: tc::Tensor) -> Result<Self> {
        match tensor.dtype() {
            DType::U8 => Ok(Self::Mask(tensor)),
            DType::I64 | DType::U32 => Ok(Self::Positions(tensor)),
            // An empty list has no elements that would determine its dtype.
            _ if tensor.elem_count() == 0 => Ok(Self::Positions(tensor.to_dtype(DType::I64)?)),
            other => Err(tc::Error::dtype(
                OP,
                format!("cannot index with a {} tensor; expected i64 or u32 positions, or a u8 mask", other.as_str()),
            )
            .into()),
        }
    }

    /// The number of the indexed tensor's dimensions to which this entry applies. `...` counts as 0 here, because the
    /// number of its dimensions depends on the other entries.
    fn consumes(&self) -> usize {
        match self {
            Self::Integer(_) | Self::Slice(_) | Self::Positions(_) => 1,
            Self::NewDim | Self::Ellipsis => 0,
            Self::Mask(mask) => mask.rank(),
        }
    }
}

/// The positions in `tensor` along a dimension of `size` elements, as a flat i64 tensor. A negative position i counts
/// from the end: it becomes i + `size`.
///
/// # Errors
/// [`tc::Error::Index`] if a position is out of range.
fn positions(tensor: &tc::Tensor, size: usize) -> tc::Result<tc::Tensor> {
    let mut values = integers(tensor)?;
    for value in &mut values {
        let position = if *value < 0 { value.saturating_add_unsigned(size as u64) } else { *value };
        if !(0..size as i64).contains(&position) {
            return Err(tc::Error::index(
                OP,
                format!("position {value} is out of range for a dimension of size {size}"),
            ));
        }
        *value = position;
    }
    let count = values.len();
    tc::Tensor::from(tc::raw::from_vec(values, count)).to_device(tensor.device())
}

/// The positions, in the flattened mask, of the elements that are not 0. They are on `device`, which may not be the
/// mask's: a mask from a Python list is on the host.
fn mask_positions(mask: &tc::Tensor, device: &tc::Device) -> tc::Result<tc::Tensor> {
    let values = mask.to_vec::<u8>()?;
    let ids: Vec<i64> = values.iter().enumerate().filter(|(_, m)| **m != 0).map(|(i, _)| i as i64).collect();
    let count = ids.len();
    tc::Tensor::from(tc::raw::from_vec(ids, count)).to_device(device)
}

/// A copy of `dims` with `new` in place of `dims[dim..dim + count]`.
fn replaced(dims: &[usize], dim: usize, count: usize, new: &[usize]) -> Vec<usize> {
    [&dims[..dim], new, &dims[dim + count..]].concat()
}

/// Index `tensor` with the entries `items`. `catch_panics` runs an operation of the library and turns a panic in it
/// into a Python error.
///
/// # Errors
/// Those of [`Tensor::__getitem__`].
fn apply(tensor: &tc::Tensor, items: &[Item<'_>]) -> Result<tc::Tensor> {
    let rank = tensor.rank();
    let consumed: usize = items.iter().map(Item::consumes).sum();
    if consumed > rank {
        let message =
            format!("the index covers {consumed} dimensions, but the tensor has {rank} (shape {:?})", tensor.dims());
        return Err(tc::Error::index(OP, message).into());
    }
    if items.iter().filter(|item| matches!(item, Item::Ellipsis)).count() > 1 {
        return Err(tc::Error::index(OP, "found more than one `...` in an index").into());
    }
    if items.iter().filter(|item| matches!(item, Item::Positions(_) | Item::Mask(_))).count() > 1 {
        return Err(tc::Error::argument(
            OP,
            "found more than one tensor in an index; index by one at a time, or use gather()",
        )
        .into());
    }
    let mut result = tensor.clone();
    // The dimension to which the next entry applies: its index in `result`, which already has the effect of the entries
    // before, and its index in `tensor`, for messages.
    let (mut dim, mut source_dim) = (0, 0);
    for item in items {
        match item {
            Item::Integer(position) => {
                let size = result.dims()[dim];
                let index = if *position < 0 { position.saturating_add_unsigned(size as u64) } else { *position };
                if !(0..size as i64).contains(&index) {
                    let message =
                        format!("position {position} is out of range for dimension {source_dim} of size {size}");
                    return Err(tc::Error::index(OP, message).into());
                }
                result = catch_panics(|| result.narrow(dim, index as usize, 1)?.squeeze(dim))?;
            }
            Item::Slice(slice) => {
                let size = result.dims()[dim];
                let range = slice.indices(size as isize)?;
                if range.step == 1 || range.slicelength == 0 {
                    if range.slicelength != size {
                        // Python's start of an empty slice may be -1, if the step is negative.
                        let start = if range.slicelength == 0 { 0 } else { range.start as usize };
                        result = catch_panics(|| result.narrow(dim, start, range.slicelength))?;
                    }
                } else {
                    result = catch_panics(|| result.strided(dim, range.start as usize, range.slicelength, range.step))?;
                }
                dim += 1;
            }
            Item::NewDim => {
                result = catch_panics(|| result.unsqueeze(dim))?;
                dim += 1;
            }
            Item::Ellipsis => {
                dim += rank - consumed;
                source_dim += rank - consumed;
            }
            Item::Positions(ids) => {
                let dims = replaced(result.dims(), dim, 1, ids.dims());
                result = catch_panics(|| {
                    // Positions from a Python list are on the host, and must move to the device of the indexed tensor.
                    let ids = positions(ids, result.dims()[dim])?.to_device(result.device())?;
                    result.index_select(&ids, dim)?.reshape(dims)
                })?;
                dim += ids.rank();
            }
            Item::Mask(mask) => {
                let count = mask.rank();
                let covered = &result.dims()[dim..dim + count];
                if covered != mask.dims() {
                    let message = format!(
                        "the mask has shape {:?}, expected that of the indexed dimensions, {covered:?}",
                        mask.dims()
                    );
                    return Err(tc::Error::index(OP, message).into());
                }
                let flat_dims = replaced(result.dims(), dim, count, &[mask.elem_count()]);
                result = catch_panics(|| {
                    result.reshape(flat_dims)?.index_select(&mask_positions(mask, tensor.device())?, dim)
                })?;
                dim += 1;
            }
        }
        source_dim += item.consumes();
    }
    Ok(result)
}

#[pymethods]
impl Tensor {
    /// Index with integers, slices with any step, None and `...` as in numpy. The index may also contain either one
    /// tensor of integers (positions along one dimension) or one u8 mask, as in torch; an array or a list counts as a
    /// tensor. The result is a view unless the index contains a tensor or a slice with a step other than 1. Indexing is
    /// differentiable.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if a position is out of range, the index has more dimensions than this tensor, a mask
    ///         has another shape than the dimensions to which it applies, `...` appears twice, or an entry has another
    ///         type.
    ///     DTypeError: if a tensor in the index is not u8, u32 or i64.
    ///     ArgumentError: if the index contains several tensors, or an integer outside the range of i64.
    ///     ValueError: if the step of a slice is 0.
    ///     DeviceError: if the index contains a tensor on a GPU inside a function that is being captured.
    fn __getitem__(&self, index: &Bound<'_, PyAny>) -> Result<Self> {
        let items = match index.cast::<PyTuple>() {
            Ok(tuple) => tuple.iter().map(|item| Item::parse(&item)).collect::<Result<Vec<_>>>()?,
            Err(_) => vec![Item::parse(index)?],
        };
        apply(&self.0, &items).map(Self)
    }

    /// Select the n slices with the indices `index` along `dim`, in the order of `index`. The result has the size n
    /// along `dim`.
    ///
    /// Args:
    ///     dim: the dimension.
    ///     index: (n,), i64 or u32. Negative indices are out of range.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if an index or the dimension is out of range.
    ///     ShapeError: if `index` does not have one dimension.
    ///     DTypeError: if `index` is neither i64 nor u32.
    ///     DeviceError: if `index` is on another device.
    fn index_select(&self, py: Python<'_>, dim: Integer, index: &Self) -> Result<Self> {
        let dim = dim.dim("index_select", self.0.rank())?;
        compute(py, self.0.elem_count(), || self.0.index_select(&index.0, dim)).map(Self)
    }

    /// Select one element for each element of `index`, as torch's `gather` does. For a matrix and `dim=1`, this is
    /// `result[i, j] = self[i, index[i, j]]`. The result has the shape of `index`.
    ///
    /// Args:
    ///     dim: the dimension along which `index` selects.
    ///     index: i64 or u32, with as many dimensions as this tensor, and sizes of at most this tensor's except along
    ///         `dim`. Negative indices are out of range.
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if an index or the dimension is out of range.
    ///     ShapeError: if `index` has another number of dimensions or a larger size.
    ///     DTypeError: if `index` is neither i64 nor u32.
    ///     DeviceError: if `index` is on another device.
    fn gather(&self, py: Python<'_>, dim: Integer, index: &Self) -> Result<Self> {
        let dim = dim.dim("gather", self.0.rank())?;
        compute(py, index.0.elem_count(), || self.0.gather(&index.0, dim)).map(Self)
    }

    /// Look up the rows with the indices `ids` in this table (rows, width). If `ids` has the shape (...), the result is
    /// (..., width).
    ///
    /// Raises:
    ///     IndexOutOfRangeError: if an index is negative, or not less than the number of rows.
    ///     ShapeError: if the table is not a matrix.
    ///     DTypeError: if `ids` is neither i64 nor u32.
    ///     DeviceError: if `ids` is on another device.
    fn embedding(&self, py: Python<'_>, ids: &Self) -> Result<Self> {
        compute(py, ids.0.elem_count(), || tc::ops::index::embedding(&self.0, &ids.0)).map(Self)
    }
}
