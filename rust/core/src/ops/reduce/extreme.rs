//! Largest and smallest elements. NaN counts both as the largest and as the smallest, as in torch.

use super::super::index::{gather_backward, gather_raw};
use super::super::integer;
use super::{Reduction, Scale};
use crate::cpu::{Binary, Real, Ternary};
use crate::raw::{Raw, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record, record_with_aux};
use crate::{Error, Result, Tensor, checkpoint, compute};

pub(super) static MAX: OpInfo = OpInfo::cheap("max");
pub(super) static MIN: OpInfo = OpInfo::cheap("min");
const ARGMAX: &str = "argmax";

#[derive(Clone, Copy)]
enum Extreme {
    Max,
    Min,
}

impl Extreme {
    const fn info(self) -> &'static OpInfo {
        match self {
            Self::Max => &MAX,
            Self::Min => &MIN,
        }
    }
}

/// 1 where two elements are equal, else 0.
#[derive(Clone, Copy)]
struct Equal;

impl Binary for Equal {
    const KERNEL: &'static str = "equal";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R) -> R {
        if a == b { R::ONE } else { R::ZERO }
    }
}

/// The part of the gradient of a result that an element gets. `is_equal` is 1 if the element is equal to the result,
/// else 0; `count` is the number of elements that are equal to the result.
#[derive(Clone, Copy)]
struct Share;

impl Ternary for Share {
    const KERNEL: &'static str = "share";

    #[inline(always)]
    fn apply<R: Real>(&self, is_equal: R, grad: R, count: R) -> R {
        is_equal * grad / count
    }
}

/// Divides the gradient of a result equally among all elements that are equal to the result.
struct SharedBackward {
    reduction: Reduction,
    x: Saved,
    result: Saved,
}

impl Backward for SharedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let mask = compute::binary(&self.x.get()?, &self.reduction.spread(&self.result.get()?)?, Equal)?;
        let count = compute::sum(&mask, &self.reduction.dims, /* keepdim: */ true)?;
        let grad = compute::ternary(&mask, &self.reduction.spread(context.grad())?, &count, Share)?;
        context.add(0, grad)
    }
}

/// Passes the gradient of a result to the one element that was picked as the extreme.
struct PickedBackward {
    op: &'static OpInfo,
    reduction: Reduction,
    /// For each result, the index of the picked element along the reduced dimension.
    picked: Saved,
}

impl Backward for PickedBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let dim = self.reduction.dims[0];
        let size = self.reduction.input[dim];
        let picked = self.picked.get()?;
        let grad = compute::contiguous(context.grad())?.reshape(self.reduction.keepdim_shape.as_slice())?;
        context.add(0, gather_backward(self.op.name, &grad, &picked, dim, size)?)
    }
}

/// Checks that each result has at least one element to pick from.
fn check_not_empty(op: &'static str, reduction: &Reduction) -> Result<()> {
    if reduction.count > 0 {
        return Ok(());
    }
    Err(Error::shape(
        op,
        format!(
            "shape {:?} has no elements along dimensions {:?}, expected at least one",
            reduction.input, reduction.dims
        ),
    ))
}

/// `raw` without the dimension `dim`, which has size 1; `raw` itself if `keepdim`.
fn squeezed_unless(keepdim: bool, raw: Raw, dim: usize) -> Result<Raw> {
    Ok(if keepdim { raw } else { raw.squeeze(dim)? })
}

impl Tensor {
    /// The extreme over `dims`; [`max`](Self::max) says which elements get its gradient.
    fn extreme(&self, extreme: Extreme, dims: &[usize], keepdim: bool) -> Result<Self> {
        let op = extreme.info();
        let reduction = Reduction::of(op.name, self, dims)?;
        check_not_empty(op.name, &reduction)?;
        if !is_float(self.dtype()) {
            return self.integer_extreme(extreme, &reduction.dims, keepdim);
        }
        if let &[dim] = reduction.dims.as_slice() {
            return record_with_aux(
                op,
                &[self],
                || {
                    // `picked` (the indices) and `values` have size 1 along `dim`. The smallest element is where the
                    // negated tensor has its largest.
                    let picked = match extreme {
                        Extreme::Max => compute::argmax(&self.raw, dim, /* keepdim: */ true)?,
                        Extreme::Min => {
                            compute::argmax(&compute::unary(&self.raw, Scale(-1.0))?, dim, /* keepdim: */ true)?
                        }
                    };
                    let values = gather_raw(op.name, &self.raw, &picked, dim, /* count: */ 1)?;
                    Ok((squeezed_unless(keepdim, values, dim)?, [picked].into_iter().collect()))
                },
                |saver, _, aux| PickedBackward { op, reduction: reduction.clone(), picked: saver.save_raw(&aux[0]) },
            );
        }
        self.shared_extreme(extreme, reduction, keepdim)
    }

    /// The extreme over the dimensions of `reduction`, with a gradient that equal elements share.
    fn shared_extreme(&self, extreme: Extreme, reduction: Reduction, keepdim: bool) -> Result<Self> {
        record(
            extreme.info(),
            &[self],
            || match extreme {
                Extreme::Max => compute::max(&self.raw, &reduction.dims, keepdim),
                Extreme::Min => compute::min(&self.raw, &reduction.dims, keepdim),
            },
            |saver, result| SharedBackward {
                reduction: reduction.clone(),
                x: saver.save(self),
                result: saver.save_raw(result),
            },
        )
    }

    /// The extreme over all dimensions; equal elements share the gradient, even if there is only one dimension.
    fn extreme_all(&self, extreme: Extreme) -> Result<Self> {
        let reduction = Reduction::of(extreme.info().name, self, &self.all_dims())?;
        check_not_empty(extreme.info().name, &reduction)?;
        if !is_float(self.dtype()) {
            return self.integer_extreme(extreme, &reduction.dims, /* keepdim: */ false);
        }
        self.shared_extreme(extreme, reduction, /* keepdim: */ false)
    }

    fn integer_extreme(&self, extreme: Extreme, dims: &[usize], keepdim: bool) -> Result<Self> {
        match extreme {
            Extreme::Max => integer::extreme(self, dims, keepdim, Raw::max_keepdim),
            Extreme::Min => integer::extreme(self, dims, keepdim, Raw::min_keepdim),
        }
    }

    /// The largest element over `dims`. Over one dimension, the first of equal elements gets the gradient, as in
    /// torch's `max(dim)`. Over several dimensions, equal elements share the gradient equally, as in torch's `amax`.
    /// Integers have no gradient.
    ///
    /// # Errors
    /// [`Error::Shape`] if a result has no elements to pick from, [`Error::Index`] if a dimension is out of range,
    /// [`Error::Argument`] if a dimension is named twice.
    pub fn max(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        self.extreme(Extreme::Max, dims, keepdim)
    }

    /// The largest of all elements; equal elements share the gradient equally.
    ///
    /// # Errors
    /// As [`max`](Self::max).
    pub fn max_all(&self) -> Result<Self> {
        self.extreme_all(Extreme::Max)
    }

    /// The smallest element over `dims`, with gradients as in [`max`](Self::max).
    ///
    /// # Errors
    /// As [`max`](Self::max).
    pub fn min(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        self.extreme(Extreme::Min, dims, keepdim)
    }

    /// The smallest of all elements; equal elements share the gradient equally.
    ///
    /// # Errors
    /// As [`max`](Self::max).
    pub fn min_all(&self) -> Result<Self> {
        self.extreme_all(Extreme::Min)
    }

    /// The index along `dim` of the largest element (of the first one, if several are equal), as u32. The result has no
    /// gradient.
    ///
    /// # Errors
    /// As [`max`](Self::max), and [`Error::DType`] if the tensor is not floating point.
    pub fn argmax(&self, dim: usize, keepdim: bool) -> Result<Self> {
        check_not_empty(ARGMAX, &Reduction::of_floats(ARGMAX, self, &[dim])?)?;
        // A checkpoint that recomputes this call must find the same values in `self`.
        checkpoint::reads(&[self]);
        Ok(Self::constant(compute::argmax(&self.raw, dim, keepdim)?))
    }
}
