//! Selection between two tensors by a mask: torch's `where`.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::DType;

use super::arithmetic::{check, reduced};
#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::compute::{self, on_device};
use crate::raw::{Raw, check_allocation_on};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor};

static SELECT: OpInfo = OpInfo::cheap("where");

struct SelectBackward {
    mask: Raw,
    /// The shapes of `a` and `b`.
    dims: [Vec<usize>; 2],
}

impl Backward for SelectBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        let zero = compute::zeros(&[], grad.dtype(), grad.device())?;
        // The operand `a` gets the gradient where the mask is not 0, and 0 elsewhere; the operand `b` the reverse.
        // Below, `[a, b]` are not these operands: they are what the mask selects from to give one operand's gradient.
        for (index, [a, b]) in [[&grad, &zero], [&zero, &grad]].into_iter().enumerate() {
            if context.needs(index) {
                let broadcast_grad = select_raw(&self.mask, a, b, grad.dims())?;
                // Sums over the dimensions along which the operand was broadcast.
                context.add(index, reduced(broadcast_grad, &self.dims[index])?)?;
            }
        }
        Ok(())
    }
}

/// `a` where `mask` (u8) is not 0, else `b`. The operands broadcast to `dims`; `a` and `b` have one dtype.
pub(super) fn select_raw(mask: &Raw, a: &Raw, b: &Raw, dims: &[usize]) -> Result<Raw> {
    on_device!(
        mask.device(),
        cuda => cuda::select(SELECT.name, mask, a, b, dims),
        cpu => Ok(mask.broadcast_as(dims)?.where_cond(&a.broadcast_as(dims)?, &b.broadcast_as(dims)?)?),
    )
}

impl Tensor {
    /// The elements of `a` where `mask` (u8) is not 0, and those of `b` elsewhere. The three shapes broadcast as in
    /// numpy.
    ///
    /// # Errors
    /// [`Error::DType`] if the mask is not u8, or `a` and `b` differ in dtype; [`Error::Device`] if the tensors are on
    /// different devices; [`Error::Shape`] if the shapes do not broadcast; [`Error::OutOfMemory`] if the result does
    /// not fit in memory.
    pub fn select(mask: &Self, a: &Self, b: &Self) -> Result<Self> {
        check(SELECT.name, a, b)?;
        if mask.dtype() != DType::U8 {
            return Err(Error::dtype(
                SELECT.name,
                format!("the mask is {}, expected u8, as comparisons return it", mask.dtype().as_str()),
            ));
        }
        if !mask.device().same_device(a.device()) {
            return Err(Error::device(
                SELECT.name,
                "the mask is on another device than the values; move one with to()",
            ));
        }
        let shape = a.shape().broadcast_shape_binary_op(b.shape(), SELECT.name)?;
        let shape = shape.broadcast_shape_binary_op(mask.shape(), SELECT.name)?;
        check_allocation_on(a.device(), SELECT.name, shape.dims(), a.dtype())?;
        record(
            &SELECT,
            &[a, b],
            || select_raw(&mask.raw, &a.raw, &b.raw, shape.dims()),
            |_, _| SelectBackward { mask: mask.raw.clone(), dims: [a.dims().to_vec(), b.dims().to_vec()] },
        )
    }
}

/// Registry entries of this file.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[Entry {
    info: &SELECT,
    cases: || {
        let select = |x: &[Tensor]| {
            let mask = Tensor::from_vec(vec![1u8, 0, 1, 0, 1], 5, x[0].device())?;
            Tensor::select(&mask, &x[0], &x[1])
        };
        vec![Case::new("same shape", &[&[3, 5], &[3, 5]], select), Case::new("broadcast", &[&[3, 1], &[5]], select)]
    },
}];
