//! Selection by a mask.

use candle_core::DType;

use super::arithmetic::{check, reduced};
#[cfg(feature = "testing")]
use super::case::{Case, Entry};
use crate::raw::{Raw, check_allocation_on};
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor};

static SELECT: OpInfo = OpInfo::cheap("where");

struct SelectBackward {
    mask: Raw,
    dims: [Vec<usize>; 2],
}

impl Backward for SelectBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad().clone();
        let zeros = Raw::zeros((), grad.dtype(), grad.device())?.broadcast_as(grad.shape())?;
        for index in 0..2 {
            if context.needs(index) {
                let part = if index == 0 {
                    self.mask.where_cond(&grad, &zeros)?
                } else {
                    self.mask.where_cond(&zeros, &grad)?
                };
                context.add(index, reduced(part, &self.dims[index])?)?;
            }
        }
        Ok(())
    }
}

impl Tensor {
    /// The elements of `a` where `mask` (u8) is not 0, and those of `b` elsewhere. The three shapes broadcast as in numpy.
    ///
    /// # Errors
    /// [`Error::DType`] if the mask is not u8, or `a` and `b` differ in dtype; [`Error::Device`] if `a` and `b` differ in device;
    /// [`Error::Shape`] if the shapes do not broadcast.
    pub fn select(mask: &Self, a: &Self, b: &Self) -> Result<Self> {
        check(SELECT.name, a, b)?;
        if mask.dtype() != DType::U8 {
            return Err(Error::dtype(
                SELECT.name,
                format!("the mask is {}, expected u8, as comparisons return it", mask.dtype().as_str()),
            ));
        }
        let shape = a.shape().broadcast_shape_binary_op(b.shape(), SELECT.name)?;
        let shape = shape.broadcast_shape_binary_op(mask.shape(), SELECT.name)?;
        check_allocation_on(a.device(), SELECT.name, shape.dims(), a.dtype())?;
        let mask = mask.raw.broadcast_as(&shape)?;
        record(
            &SELECT,
            &[a, b],
            || Ok(mask.where_cond(&a.raw.broadcast_as(&shape)?, &b.raw.broadcast_as(&shape)?)?),
            |_, _| SelectBackward { mask: mask.clone(), dims: [a.dims().to_vec(), b.dims().to_vec()] },
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
