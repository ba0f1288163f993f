//! Picking elements by integer ids: index_select, gather, embedding.
//!
//! Ids are i64 or u32 and count from 0. An id out of range is an error; negative ids never wrap around. On the CPU the
//! error names the id and its position among the ids. On CUDA the error names only the position, and the next function
//! that reads a value or waits for the device returns the error; until then, results computed from the id are
//! undefined. If ids pick an element several times, its gradients are added in the order of the ids, so that the sum
//! does not depend on the number of threads. The sum is in f32, or in f64 for f64.

#[cfg(feature = "testing")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

use crate::compute::on_device;
use crate::quantized::weight::WeightRef;
use crate::raw::{Raw, to_vec};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{DType, Device, Error, Result, Tensor, compute};

#[cfg(feature = "testing")]
pub use cases::ENTRIES;

static INDEX_SELECT: OpInfo = OpInfo::cheap("index_select");
static GATHER: OpInfo = OpInfo::cheap("gather");
static EMBEDDING: OpInfo = OpInfo::cheap("embedding");

/// Copies the ids to the host in row-major order, and checks that each is from 0 to `size` - 1. For the CPU forms.
fn checked_ids(op: &'static str, ids: &Raw, size: usize) -> Result<Vec<usize>> {
    let out_of_range = |id: i64, at: usize| {
        Error::index(
            op,
            format!(
                "id {id} at position {at} is out of range for a dimension of size {size}; expected 0 <= id < {size}"
            ),
        )
    };
    match ids.dtype() {
        DType::I64 => {
            let check = |(at, id): (usize, i64)| {
                usize::try_from(id).ok().filter(|&i| i < size).ok_or_else(|| out_of_range(id, at))
            };
            to_vec::<i64>(ids)?.into_iter().enumerate().map(check).collect()
        }
        DType::U32 => {
            let check = |(at, id): (usize, u32)| {
                Some(id as usize).filter(|&i| i < size).ok_or_else(|| out_of_range(i64::from(id), at))
            };
            to_vec::<u32>(ids)?.into_iter().enumerate().map(check).collect()
        }
        other => {
            Err(Error::dtype(op, format!("ids are {}, expected i64 or u32; convert them with to()", other.as_str())))
        }
    }
}

/// Computes `y[o, j, i] = x[o, ids[j], i]`, with `x` treated as (outer, size, inner), where `size` is dimension `dim`.
pub(crate) fn select_raw(op: &'static str, x: &Raw, ids: &Raw, dim: usize) -> Result<Raw> {
    on_device!(x.device(), cuda => cuda::select(op, x, ids, dim), cpu => cpu::select(op, x, ids, dim))
}

/// The gradient of [`select_raw`]: `dx[o, ids[j], i] += g[o, j, i]`, with `size` elements along `dim`.
pub(super) fn select_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    on_device!(
        g.device(),
        cuda => cuda::select_backward(op, g, ids, dim, size),
        cpu => cpu::select_backward(op, g, ids, dim, size),
    )
}

/// Computes `y[o, j, i] = x[o, ids[o, j, i], i]`, with `count` elements along `dim` of the result. Except along `dim`,
/// `x` has the sizes of `ids`.
pub(super) fn gather_raw(op: &'static str, x: &Raw, ids: &Raw, dim: usize, count: usize) -> Result<Raw> {
    on_device!(
        x.device(),
        cuda => cuda::gather(op, x, ids, dim, count),
        cpu => cpu::gather(op, x, ids, dim, count),
    )
}

/// The gradient of [`gather_raw`]: `dx[o, ids[o, j, i], i] += g[o, j, i]`, with `size` elements along `dim`.
pub(super) fn gather_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    on_device!(
        g.device(),
        cuda => cuda::gather_backward(op, g, ids, dim, size),
        cpu => cpu::gather_backward(op, g, ids, dim, size),
    )
}

fn check_dim(op: &'static str, x: &Tensor, dim: usize) -> Result<()> {
    if dim < x.rank() {
        return Ok(());
    }
    Err(Error::index(op, format!("dimension {dim} is out of range for shape {:?}", x.dims())))
}

fn check_device(op: &'static str, device: &Device, ids: &Tensor) -> Result<()> {
    if device.same_device(ids.device()) {
        return Ok(());
    }
    Err(Error::device(op, "the ids are on another device than the values; move one with to()"))
}

/// The backward pass of `index_select` and `embedding`. It first reshapes the gradient of the result to the shape that
/// `index_select` gives it: that of the input, with the number of ids in place of dimension `dim`.
struct SelectBackward {
    op: &'static OpInfo,
    /// The shape of the input.
    dims: Vec<usize>,
    dim: usize,
    ids: Saved,
}

impl Backward for SelectBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let ids = self.ids.get()?;
        let mut dims = self.dims.clone();
        dims[self.dim] = ids.elem_count();
        let grad = compute::contiguous(context.grad())?.reshape(dims)?;
        context.add(0, select_backward(self.op.name, &grad, &ids, self.dim, self.dims[self.dim])?)
    }
}

struct GatherBackward {
    /// The shape of the input.
    dims: Vec<usize>,
    dim: usize,
    ids: Saved,
}

impl Backward for GatherBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (ids, size) = (self.ids.get()?, self.dims[self.dim]);
        // The gradient of the corner of the input that the ids can reach. Outside the corner the gradient is 0.
        let part = gather_backward(GATHER.name, context.grad(), &ids, self.dim, size)?;
        if part.dims() == self.dims {
            return context.add(0, part);
        }
        let grad = compute::zeros(&self.dims, part.dtype(), part.device())?;
        compute::copy_into(&corner(&grad, part.dims())?, &part)?;
        context.add(0, grad)
    }
}

/// A view of the first `dims[d]` elements of `x` along each dimension d.
fn corner(x: &Raw, dims: &[usize]) -> Result<Raw> {
    let mut part = x.clone();
    for (dim, &length) in dims.iter().enumerate() {
        part = part.narrow(dim, 0, length)?;
    }
    Ok(part)
}

impl Tensor {
    /// The slices along dimension `dim` that the vector `ids` names, in the order of the ids; an id may repeat.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` or an id is out of range (as every negative id is), [`Error::Shape`] if `ids` is not a
    /// vector, [`Error::DType`] if `ids` is not i64 or u32, [`Error::Device`] if `ids` is on another device than this
    /// tensor.
    pub fn index_select(&self, ids: &Self, dim: usize) -> Result<Self> {
        check_dim(INDEX_SELECT.name, self, dim)?;
        check_device(INDEX_SELECT.name, self.device(), ids)?;
        if ids.rank() != 1 {
            return Err(Error::shape(
                INDEX_SELECT.name,
                format!("ids have shape {:?}, expected one dimension", ids.dims()),
            ));
        }
        record(
            &INDEX_SELECT,
            &[self],
            || select_raw(INDEX_SELECT.name, &self.raw, &ids.raw, dim),
            |saver, _| SelectBackward { op: &INDEX_SELECT, dims: self.dims().to_vec(), dim, ids: saver.save(ids) },
        )
    }

    /// One element along `dim` for each id: with `dim` 1 in three dimensions, `y[i][j][k] = x[i][ids[i][j][k]][k]`.
    /// `ids` has as many dimensions as this tensor, and its sizes are at most those of this tensor, except along `dim`.
    /// The result has the shape of `ids`.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` or an id is out of range (as every negative id is), [`Error::Shape`] if the shapes
    /// break these rules, [`Error::DType`] if `ids` is not i64 or u32, [`Error::Device`] if `ids` is on another device
    /// than this tensor.
    pub fn gather(&self, ids: &Self, dim: usize) -> Result<Self> {
        check_dim(GATHER.name, self, dim)?;
        check_device(GATHER.name, self.device(), ids)?;
        let fits = ids.rank() == self.rank() && (0..self.rank()).all(|d| d == dim || ids.dims()[d] <= self.dims()[d]);
        if !fits {
            return Err(Error::shape(
                GATHER.name,
                format!(
                    "ids have shape {:?}, the values {:?}; expected as many dimensions in ids as in the \
                     values, and sizes of ids that are at most those of the values, except along dimension {dim}",
                    ids.dims(),
                    self.dims()
                ),
            ));
        }
        record(
            &GATHER,
            &[self],
            || {
                let mut dims = ids.dims().to_vec();
                dims[dim] = self.dims()[dim];
                // The ids reach no elements outside this corner.
                let values = corner(&self.raw, &dims)?;
                gather_raw(GATHER.name, &values, &ids.raw, dim, ids.dims()[dim])
            },
            |saver, _| GatherBackward { dims: self.dims().to_vec(), dim, ids: saver.save(ids) },
        )
    }
}

/// The rows of `weight` (rows, features) that `ids` name. `ids` has any shape; the result has the shape of `ids`
/// followed by `features`. Of a quantized weight, only these rows are dequantized.
///
/// # Errors
/// [`Error::Index`] if an id is out of range (as every negative id is), [`Error::Shape`] if `weight` is not a matrix,
/// [`Error::DType`] if `ids` is not i64 or u32, [`Error::Device`] if `ids` is on another device than `weight`,
/// [`Error::Argument`] if the rows of a quantized weight cannot be read separately.
pub fn embedding<'a>(weight: impl Into<WeightRef<'a>>, ids: &Tensor) -> Result<Tensor> {
    let weight = weight.into();
    let &[_, features] = weight.dims() else {
        return Err(Error::shape(
            EMBEDDING.name,
            format!("the weight has shape {:?}, expected (rows, features)", weight.dims()),
        ));
    };
    check_device(EMBEDDING.name, weight.device(), ids)?;
    let mut dims = ids.dims().to_vec();
    dims.push(features);
    let weight = match weight {
        WeightRef::Plain(weight) => weight,
        // Quantized weights are frozen, so the tape records nothing.
        WeightRef::Quantized(matrix) => {
            let rows = matrix.select(EMBEDDING.name, &ids.raw)?;
            return rows.dequantize(matrix.dtype())?.reshape(dims);
        }
        // `here` is the weight on its device, to which it was copied from the host for this use.
        WeightRef::Streamed(streamed) => return embedding(&streamed.here()?, ids),
    };
    record(
        &EMBEDDING,
        &[weight],
        || Ok(select_raw(EMBEDDING.name, &weight.raw, &ids.raw, 0)?.reshape(dims)?),
        |saver, _| SelectBackward { op: &EMBEDDING, dims: weight.dims().to_vec(), dim: 0, ids: saver.save(ids) },
    )
}

#[cfg(test)]
mod tests;
