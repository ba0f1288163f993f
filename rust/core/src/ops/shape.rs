//! Operations on shapes. They return views where the memory layout allows it, otherwise copies; `strided`, `cat` and
//! `stack` always copy.

use candle_core::Shape;

#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use super::index::{select_backward, select_raw};
use crate::raw::{Raw, check_allocation_on};
use crate::tape::{Backward, BackwardContext, OpInfo, record, record_view};
use crate::{Error, Result, Tensor, compute};

static RESHAPE: OpInfo = OpInfo::cheap("reshape");
static PERMUTE: OpInfo = OpInfo::cheap("permute");
static BROADCAST: OpInfo = OpInfo::cheap("broadcast_to");
static NARROW: OpInfo = OpInfo::cheap("narrow");
static STRIDED: OpInfo = OpInfo::cheap("slice");
static CAT: OpInfo = OpInfo::cheap("cat");

// In the backward passes below, index 0 is the only input of the operation; `cat` alone has several inputs.

/// The field is the shape of the input.
struct ReshapeBackward(Shape);

impl Backward for ReshapeBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::contiguous(context.grad())?.reshape(&self.0)?;
        context.add(0, grad)
    }
}

/// The field is the inverse permutation.
struct PermuteBackward(Vec<usize>);

impl Backward for PermuteBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().permute(self.0.as_slice())?;
        context.add(0, grad)
    }
}

/// The field is the shape of the input.
struct BroadcastBackward(Vec<usize>);

impl Backward for BroadcastBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = compute::sum_to_shape(context.grad(), &self.0)?;
        context.add(0, grad)
    }
}

/// The backward pass of [`Tensor::narrow`]. `dims` is the shape of the input; the result begins at index `start` along
/// `dim` of the input.
struct NarrowBackward {
    dims: Vec<usize>,
    dim: usize,
    start: usize,
}

impl Backward for NarrowBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        context.add_part(0, &self.dims, self.dim, self.start, &grad)
    }
}

/// The backward pass of [`Tensor::strided`]. `ids` are the indices of the taken elements along `dim` of the input,
/// which has `size` elements along `dim`.
struct StridedBackward {
    size: usize,
    dim: usize,
    ids: Raw,
}

impl Backward for StridedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = select_backward(STRIDED.name, context.grad(), &self.ids, self.dim, self.size)?;
        context.add(0, grad)
    }
}

/// The backward pass of [`Tensor::cat`]. `lengths` are the sizes of the inputs along `dim`.
struct CatBackward {
    dim: usize,
    lengths: Vec<usize>,
}

impl Backward for CatBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let mut start = 0;
        for (index, &length) in self.lengths.iter().enumerate() {
            if context.needs(index) {
                let part = context.grad().narrow(self.dim, start, length)?;
                context.add(index, part)?;
            }
            start += length;
        }
        Ok(())
    }
}

impl Tensor {
    fn check_dim(&self, op: &'static str, dim: usize) -> Result<usize> {
        if dim < self.rank() {
            return Ok(dim);
        }
        Err(Error::index(op, format!("dimension {dim} is out of range for shape {:?}", self.dims())))
    }

    /// The same elements, in row-major order, in another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of elements differs.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elem_count() != self.elem_count() {
            return Err(Error::shape(
                "reshape",
                format!(
                    "{} elements of shape {:?} do not fill shape {:?}",
                    self.elem_count(),
                    self.dims(),
                    shape.dims()
                ),
            ));
        }
        let view = compute::contiguous(&self.raw)?.reshape(&shape)?;
        let shares_memory = self.raw.is_contiguous();
        let mut result = record_view(&RESHAPE, self, view, || ReshapeBackward(self.shape().clone()))?;
        if !shares_memory {
            // `record_view` gave the result the version of the variable that owns the input's memory. But the result is
            // a copy in memory of its own, so no change of that variable can make it invalid.
            result.version = None;
        }
        Ok(result)
    }

    /// The tensor with its dimensions in another order: dimension `i` of the result is dimension `dims[i]` of this
    /// tensor.
    ///
    /// # Errors
    /// [`Error::Shape`] if `dims` is not a permutation.
    pub fn permute(&self, dims: &[usize]) -> Result<Self> {
        let mut inverse = vec![usize::MAX; self.rank()];
        for (to, &from) in dims.iter().enumerate() {
            if from < inverse.len() && inverse[from] == usize::MAX {
                inverse[from] = to;
            }
        }
        if dims.len() != self.rank() || inverse.contains(&usize::MAX) {
            return Err(Error::shape(
                "permute",
                format!("{dims:?} is not a permutation of the {} dimensions of shape {:?}", self.rank(), self.dims()),
            ));
        }
        record_view(&PERMUTE, self, self.raw.permute(dims)?, || PermuteBackward(inverse))
    }

    /// The tensor with dimensions `a` and `b` swapped.
    ///
    /// # Errors
    /// [`Error::Index`] if a dimension is out of range.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        self.check_dim("transpose", a)?;
        self.check_dim("transpose", b)?;
        let mut dims: Vec<usize> = (0..self.rank()).collect();
        dims.swap(a, b);
        self.permute(&dims)
    }

    /// The tensor with its last two dimensions swapped.
    ///
    /// # Errors
    /// [`Error::Shape`] with fewer than two dimensions.
    pub fn t(&self) -> Result<Self> {
        if self.rank() < 2 {
            return Err(Error::shape("t", format!("shape {:?} has fewer than two dimensions", self.dims())));
        }
        self.transpose(self.rank() - 2, self.rank() - 1)
    }

    /// The tensor with a new dimension of size 1 before dimension `dim`, or after the last one if `dim` is the rank.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is above the rank.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self> {
        if dim > self.rank() {
            return Err(Error::index(
                "unsqueeze",
                format!("position {dim} is out of range for shape {:?}", self.dims()),
            ));
        }
        let shape = self.shape().clone();
        record_view(&RESHAPE, self, self.raw.unsqueeze(dim)?, || ReshapeBackward(shape))
    }

    /// The tensor without dimension `dim` if its size is 1, else unchanged.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is out of range.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        self.check_dim("squeeze", dim)?;
        if self.dims()[dim] != 1 {
            return Ok(self.clone());
        }
        let shape = self.shape().clone();
        record_view(&RESHAPE, self, self.raw.squeeze(dim)?, || ReshapeBackward(shape))
    }

    /// A view of shape `shape`, in which dimensions of size 1 and new leading dimensions are repeated.
    ///
    /// # Errors
    /// [`Error::Shape`] if this tensor does not broadcast to `shape`, [`Error::OutOfMemory`] if a tensor of shape
    /// `shape` would not fit into memory.
    pub fn broadcast_as(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let fits = shape.rank() >= self.rank()
            && self.dims().iter().rev().zip(shape.dims().iter().rev()).all(|(&have, &want)| have == want || have == 1);
        if !fits {
            return Err(Error::shape(
                "broadcast_to",
                format!("shape {:?} cannot be broadcast to {:?}", self.dims(), shape.dims()),
            ));
        }
        // The view itself needs no memory. But if `shape` is too large, the next operation cannot allocate its result,
        // or the number of elements overflows.
        check_allocation_on(self.device(), BROADCAST.name, shape.dims(), self.dtype())?;
        let dims = self.dims().to_vec();
        record_view(&BROADCAST, self, self.raw.broadcast_as(&shape)?, || BroadcastBackward(dims))
    }

    /// A view of `length` elements from `start` along `dim`.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is out of range or the elements are not all inside the dimension.
    pub fn narrow(&self, dim: usize, start: usize, length: usize) -> Result<Self> {
        self.check_dim("narrow", dim)?;
        let size = self.dims()[dim];
        if start.checked_add(length).is_none_or(|end| end > size) {
            return Err(Error::index(
                "narrow",
                format!("range {start}..{} is outside dimension {dim} of size {size}", start.saturating_add(length)),
            ));
        }
        let dims = self.dims().to_vec();
        record_view(&NARROW, self, self.raw.narrow(dim, start, length)?, || NarrowBackward { dims, dim, start })
    }

    /// A copy of `length` elements along `dim`: `start`, `start + step`, and so on. Negative steps go backwards from
    /// `start`.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is out of range or an element is outside the dimension, [`Error::Argument`] if `step`
    /// is 0.
    pub fn strided(&self, dim: usize, start: usize, length: usize, step: isize) -> Result<Self> {
        self.check_dim(STRIDED.name, dim)?;
        if step == 0 {
            return Err(Error::argument(STRIDED.name, "the step must not be 0"));
        }
        let size = self.dims()[dim] as isize;
        let ids: Vec<i64> = (0..length as isize).map(|i| (start as isize + i * step) as i64).collect();
        if ids.iter().any(|&i| i < 0 || i >= size as i64) {
            return Err(Error::index(
                STRIDED.name,
                format!("{length} elements from {start} in steps of {step} go beyond dimension {dim} of size {size}"),
            ));
        }
        let ids = Raw::from_vec(ids, length, self.device())?;
        record(
            &STRIDED,
            &[self],
            || select_raw(STRIDED.name, &self.raw, &ids, dim),
            |_, _| StridedBackward { size: self.dims()[dim], dim, ids: ids.clone() },
        )
    }

    /// Joins tensors one after the other along `dim`; the sizes of all other dimensions must agree.
    ///
    /// # Errors
    /// [`Error::Argument`] if `tensors` is empty, [`Error::Index`] if `dim` is out of range, [`Error::Shape`] if other
    /// dimensions differ in size, [`Error::DType`] if the dtypes differ, [`Error::OutOfMemory`] if the result does not
    /// fit in memory.
    pub fn cat(tensors: &[&Self], dim: usize) -> Result<Self> {
        let Some(first) = tensors.first() else {
            return Err(Error::argument("cat", "expected at least one tensor, found none"));
        };
        first.check_dim("cat", dim)?;
        for (index, tensor) in tensors.iter().enumerate().skip(1) {
            let fits = tensor.rank() == first.rank()
                && (0..first.rank()).all(|d| d == dim || tensor.dims()[d] == first.dims()[d]);
            if !fits {
                return Err(Error::shape(
                    "cat",
                    format!(
                        "tensor {index} has shape {:?}, expected {:?} except in dimension {dim}",
                        tensor.dims(),
                        first.dims()
                    ),
                ));
            }
            if tensor.dtype() != first.dtype() {
                return Err(Error::dtype(
                    "cat",
                    format!(
                        "tensor {index} is {}, the first is {}; convert one with to()",
                        tensor.dtype().as_str(),
                        first.dtype().as_str()
                    ),
                ));
            }
        }
        let mut dims = first.dims().to_vec();
        dims[dim] = tensors.iter().map(|t| t.dims()[dim]).sum();
        check_allocation_on(first.device(), CAT.name, &dims, first.dtype())?;
        record(
            &CAT,
            tensors,
            || compute::cat(&tensors.iter().map(|t| &t.raw).collect::<Vec<_>>(), dim),
            |_, _| CatBackward { dim, lengths: tensors.iter().map(|t| t.dims()[dim]).collect() },
        )
    }

    /// Joins tensors of the same shape along a new dimension `dim`.
    ///
    /// # Errors
    /// As [`cat`](Self::cat).
    pub fn stack(tensors: &[&Self], dim: usize) -> Result<Self> {
        if let Some((index, other)) = tensors.iter().enumerate().find(|(_, t)| t.dims() != tensors[0].dims()) {
            return Err(Error::shape(
                "stack",
                format!("tensor {index} has shape {:?}, expected {:?} like the first", other.dims(), tensors[0].dims()),
            ));
        }
        let expanded = tensors.iter().map(|t| t.unsqueeze(dim)).collect::<Result<Vec<_>>>()?;
        Self::cat(&expanded.iter().collect::<Vec<_>>(), dim)
    }

    /// Views of consecutive parts of dimension `dim`, each of ⌈size / chunks⌉ elements. As in torch, the last part may
    /// be smaller, and there may be fewer than `chunks` parts.
    ///
    /// # Errors
    /// [`Error::Argument`] if `chunks` is 0, [`Error::Index`] if `dim` is out of range.
    pub fn chunk(&self, chunks: usize, dim: usize) -> Result<Vec<Self>> {
        self.check_dim("chunk", dim)?;
        if chunks == 0 {
            return Err(Error::argument("chunk", "the number of chunks must be at least 1, found 0"));
        }
        let size = self.dims()[dim];
        let length = size.div_ceil(chunks).max(1);
        // An empty dimension has one part, which is empty.
        (0..size.max(1)).step_by(length).map(|start| self.narrow(dim, start, length.min(size - start))).collect()
    }

    /// Views of consecutive parts of dimension `dim` with the given `lengths`, which must add up to the size of the
    /// dimension.
    ///
    /// # Errors
    /// [`Error::Shape`] if the lengths do not add up to the size, [`Error::Index`] if `dim` is out of range.
    pub fn split(&self, lengths: &[usize], dim: usize) -> Result<Vec<Self>> {
        self.check_dim("split", dim)?;
        let total: usize = lengths.iter().sum();
        if total != self.dims()[dim] {
            return Err(Error::shape(
                "split",
                format!("lengths {lengths:?} add up to {total}, dimension {dim} has size {}", self.dims()[dim]),
            ));
        }
        let mut start = 0;
        lengths
            .iter()
            .map(|&length| {
                let part = self.narrow(dim, start, length);
                start += length;
                part
            })
            .collect()
    }
}

/// Registry entries of this file. A case has a label, the shapes of its inputs, and the call to test. The label says
/// what is special about the case, and is empty if nothing is.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &RESHAPE,
        cases: || {
            vec![
                Case::new("", &[&[3, 4]], |x| x[0].reshape((2, 6))),
                Case::new("unsqueeze", &[&[3, 4]], |x| x[0].unsqueeze(1)?.squeeze(1)),
                Case::new("same", &[&[3, 4]], |x| x[0].reshape((3, 4))),
                Case::new("of a transposed tensor", &[&[3, 4]], |x| x[0].t()?.reshape((2, 6))),
                Case::new("empty", &[&[0, 4]], |x| x[0].reshape((2, 0))),
            ]
        },
    },
    Entry {
        info: &PERMUTE,
        cases: || {
            vec![
                Case::new("", &[&[2, 3, 4]], |x| x[0].permute(&[2, 0, 1])),
                Case::new("empty", &[&[2, 0, 4]], |x| x[0].permute(&[2, 0, 1])),
            ]
        },
    },
    Entry {
        info: &BROADCAST,
        cases: || {
            vec![
                Case::new("", &[&[3, 1]], |x| x[0].broadcast_as((2, 3, 4))),
                Case::new("to empty", &[&[3, 1]], |x| x[0].broadcast_as((3, 0))),
            ]
        },
    },
    Entry {
        info: &NARROW,
        cases: || {
            vec![
                Case::new("", &[&[3, 5]], |x| x[0].narrow(1, 1, 3)),
                Case::new("chunks", &[&[3, 5]], |x| {
                    // The parts have three and two columns.
                    let parts = x[0].chunk(2, 1)?;
                    parts[0].narrow(1, 0, 2)?.mul(&parts[1])
                }),
                Case::new("empty", &[&[3, 5]], |x| x[0].narrow(1, 5, 0)),
            ]
        },
    },
    Entry {
        info: &STRIDED,
        cases: || {
            vec![
                Case::new("all", &[&[3, 5]], |x| x[0].strided(1, 0, 5, 1)),
                Case::new("every other", &[&[3, 5]], |x| x[0].strided(1, 0, 3, 2)),
                Case::new("backwards", &[&[3, 5]], |x| x[0].strided(1, 4, 5, -1)),
            ]
        },
    },
    Entry {
        info: &CAT,
        cases: || {
            vec![
                Case::new("", &[&[2, 3], &[2, 1]], |x| Tensor::cat(&[&x[0], &x[1], &x[0]], 1)),
                Case::new("stack", &[&[2, 3], &[2, 3]], |x| Tensor::stack(&[&x[0], &x[1]], 1)),
                Case::new("one", &[&[2, 3]], |x| Tensor::cat(&[&x[0]], 1)),
                Case::new("stack of one", &[&[2, 3]], |x| Tensor::stack(&[&x[0]], 0)),
                Case::new("with empty", &[&[2, 3], &[0, 3]], |x| Tensor::cat(&[&x[0], &x[1]], 0)),
            ]
        },
    },
];
