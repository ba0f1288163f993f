//! The norm and the rotation of queries and keys where they lie in a projection.

use candle_core::DType;
use smallvec::SmallVec;

use super::super::{Affine, check_eps};
use super::{Rotation, cpu};
use crate::compute::{self, contiguous, on_device};
use crate::raw::{Raw, is_float};
use crate::{Error, Result, Tensor, checkpoint};

/// What makes the queries and keys of an attention of a projection (B, S, ≥ 3 · heads · width): its first columns are queries, keys and
/// values, head by head.
pub(in crate::ops) struct HeadNorms<'a> {
    /// Of the operation that they belong to.
    pub op: &'static str,
    /// Scales of queries and of keys, (width).
    pub weights: [Option<&'a Raw>; 2],
    /// cos and sin, (S, width / 2) or (B · S, width / 2), unless nothing turns.
    pub tables: Option<[&'a Raw; 2]>,
    pub heads: usize,
    pub width: usize,
    pub interleaved: bool,
    pub eps: f64,
}

/// 1/√(mean(x²) + eps) of the rows.
pub(in crate::ops) type HeadStatistics = SmallVec<[Raw; 2]>;

/// Check the scales of queries and of keys, (width), and cos and sin, (S, width / 2) or (B, S, width / 2), of heads in `x (B, S, ...)`.
/// All of them must be frozen.
pub(in crate::ops) fn check_head_norms(
    op: &'static str,
    x: &Tensor,
    width: usize,
    weights: [Option<&Tensor>; 2],
    tables: Option<[&Tensor; 2]>,
    eps: f64,
) -> Result<()> {
    check_eps(op, eps)?;
    for weight in weights {
        Affine::new(op, x, weight, None, &[width])?;
        if weight.is_some_and(Tensor::requires_grad) {
            let message = "the scales of queries and keys must be frozen, but one needs a gradient; use rms_norm_rope() to train it";
            return Err(Error::argument(op, message));
        }
        checkpoint::reads(weight.as_slice());
    }
    let (batch, length) = (x.dims()[0], x.dims()[1]);
    for (name, table) in ["cos", "sin"].into_iter().zip(tables.into_iter().flatten()) {
        let expected = [batch, length, width / 2];
        if table.dims() != expected && *table.dims() != expected[1..] {
            let found = table.dims();
            let message = format!("{name} has shape {found:?}, expected {:?} or {expected:?}", &expected[1..]);
            return Err(Error::shape(op, message));
        }
        if !is_float(table.dtype()) {
            let found = table.dtype().as_str();
            return Err(Error::dtype(op, format!("{name} is {found}, expected floating point; convert it with to()")));
        }
        if !table.device().same_device(x.device()) {
            return Err(Error::device(op, format!("{name} is on another device than the input; move one with to()")));
        }
        if table.requires_grad() {
            return Err(Error::NoBackward { op });
        }
        checkpoint::reads(&[table]);
    }
    Ok(())
}

impl HeadNorms<'_> {
    /// Writes normalised, turned queries and keys of a dense `x (B, S, ...)` to `y (B, S, 2 heads, width)`, whose tokens are dense; values
    /// too, if `y` has three times the heads.
    pub fn forward(&self, x: &Raw, y: &Raw) -> Result<HeadStatistics> {
        on_device!(x.device(), cuda => super::cuda::heads_forward(self, x, y), cpu => self.forward_on_cpu(x, y))
    }

    /// Writes the gradient of the columns that [`forward`](Self::forward) read to `dx (B, S, 2 or 3 heads · width)`, of that of its
    /// result, `grad`.
    pub fn backward(&self, x: &Raw, grad: &Raw, statistics: &HeadStatistics, dx: &Raw) -> Result<()> {
        on_device!(
            x.device(),
            cuda => super::cuda::heads_backward(self, [x, grad, &statistics[0]], dx),
            cpu => self.backward_on_cpu([x, grad], statistics, dx),
        )
    }

    /// How many of queries, keys and values `y` has.
    pub(super) fn parts(&self, y: &Raw) -> usize {
        y.dims()[2] / self.heads.max(1)
    }

    /// Columns of queries, keys or values as rows (B, S, heads, width), dense.
    fn part(&self, x: &Raw, index: usize) -> Result<Raw> {
        let columns = self.heads * self.width;
        let rows = contiguous(&x.narrow(2, index * columns, columns)?)?;
        Ok(rows.reshape((x.dims()[0], x.dims()[1], self.heads, self.width))?)
    }

    /// cos and sin that turn nothing, if there are none.
    fn tables_or_still(&self, x: &Raw) -> Result<[Raw; 2]> {
        if let Some([cos, sin]) = self.tables {
            return Ok([cos.clone(), sin.clone()]);
        }
        let number = |value| compute::full(value, &[1, self.width / 2], DType::F64, x.device());
        Ok([number(1.0)?, number(0.0)?])
    }

    fn forward_on_cpu(&self, x: &Raw, y: &Raw) -> Result<HeadStatistics> {
        let [cos, sin] = self.tables_or_still(x)?;
        let rotation = Rotation { tables: [&cos, &sin], repeats: self.heads, interleaved: self.interleaved };
        let place = |index| y.narrow(2, index * self.heads, self.heads);
        if self.parts(y) == 3 {
            compute::copy_into(&place(2)?, &self.part(x, 2)?)?;
        }
        (0..2)
            .map(|index| {
                let rows = self.part(x, index)?;
                let [turned, rstd] = cpu::forward(self.op, &rows, self.weights[index], &rotation, self.eps)?;
                compute::copy_into(&place(index)?, &turned)?;
                Ok(rstd)
            })
            .collect()
    }

    fn backward_on_cpu(&self, [x, grad]: [&Raw; 2], statistics: &HeadStatistics, dx: &Raw) -> Result<()> {
        let [cos, sin] = self.tables_or_still(x)?;
        let rotation = Rotation { tables: [&cos, &sin], repeats: self.heads, interleaved: self.interleaved };
        let columns = self.heads * self.width;
        for index in 0..self.parts(grad) {
            let grad = contiguous(&grad.narrow(2, index * self.heads, self.heads)?)?;
            let rows = match statistics.get(index) {
                Some(rstd) => {
                    let saved = [&self.part(x, index)?, &grad, rstd];
                    cpu::input_gradient(self.op, saved, self.weights[index], &rotation)?
                }
                // Values are what they were.
                None => grad,
            };
            let place = dx.narrow(2, index * columns, columns)?;
            compute::copy_into(&place, &rows.reshape(place.shape())?)?;
        }
        Ok(())
    }
}
