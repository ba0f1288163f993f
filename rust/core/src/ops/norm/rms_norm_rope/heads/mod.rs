//! RMS norm and rotary embedding, or only one of them, of an attention's queries and keys. Queries, keys and values are
//! columns of one projection. The CUDA kernels read these columns in place; the CPU form copies them first.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::DType;
use smallvec::SmallVec;

use super::{Rotation, cpu};
use crate::compute::{self, contiguous, on_device};
use crate::ops::norm::{Affine, check_eps};
use crate::raw::{Raw, is_float};
use crate::{Error, Result, Tensor, checkpoint};

/// How an attention's queries and keys are computed from a projection (B, S, columns). The first columns are those of
/// all query heads, then of all key heads, then of all value heads; a head has `width` columns.
pub(in crate::ops) struct HeadNorms<'a> {
    /// The name of the operation, for errors.
    pub op: &'static str,
    /// The norms' scales of queries and of keys, (width) each.
    pub weights: [Option<&'a Raw>; 2],
    /// cos and sin: (S, width / 2) if all samples have the same angles, otherwise (B · S, width / 2). `None` if nothing
    /// is rotated.
    pub tables: Option<[&'a Raw; 2]>,
    /// Number of query heads; number of key heads, which is also the number of value heads.
    pub heads: [usize; 2],
    /// Number of columns of a head.
    pub width: usize,
    /// Which two features form a pair, as in [`rope`](crate::ops::rope::rope).
    pub interleaved: bool,
    /// The epsilon that is added to the mean square of a head; `None` if nothing is normalised.
    pub eps: Option<f64>,
}

/// 1/√(mean(x²) + eps) of each head of each token: on CUDA one tensor for all heads, on the CPU one tensor for query
/// heads and one for key heads. Empty if nothing is normalised.
pub(in crate::ops) type HeadStatistics = SmallVec<[Raw; 2]>;

/// Checks the operands of [`HeadNorms`] for an `x` of B (`batch`) samples of S (`length`) tokens. The scales of queries
/// and of keys (`weights`) must have shape (width); cos and sin (`tables`) must have shape (S, width / 2) or
/// (B, S, width / 2), which the caller flattens for [`HeadNorms`]. All of them must be frozen.
pub(in crate::ops) fn check_head_norms(
    op: &'static str,
    x: &Tensor,
    [batch, length]: [usize; 2],
    width: usize,
    weights: [Option<&Tensor>; 2],
    tables: Option<[&Tensor; 2]>,
    eps: Option<f64>,
) -> Result<()> {
    check_eps(op, eps.unwrap_or(0.0))?;
    for weight in weights {
        let bias = None;
        // Checks the weight; the result is not needed.
        Affine::new(op, x, weight, bias, &[width])?;
        if weight.is_some_and(Tensor::requires_grad) {
            let message = "the scales of queries and keys must be frozen, but one needs a gradient; use rms_norm_rope() to train it";
            return Err(Error::argument(op, message));
        }
        // Tells checkpoints that the operation reads this tensor, which is not among its recorded inputs.
        checkpoint::reads(weight.as_slice());
    }
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
    /// Writes the normalised and rotated queries and keys of a dense `x (B, S, columns)` to
    /// `y (B, S, query heads + key heads, width)`. The last two dimensions of `y` must be dense. If `y` also has room
    /// for the value heads, the values are copied there.
    pub fn forward(&self, x: &Raw, y: &Raw) -> Result<HeadStatistics> {
        on_device!(x.device(), cuda => cuda::forward(self, x, y), cpu => self.forward_on_cpu(x, y))
    }

    /// Writes to `dx (B, S, heads · width)` the gradient of the columns of `x` that [`forward`](Self::forward) has
    /// read. `grad` is the gradient of `y`, in the shape of `y`. If `grad` has no value heads, `dx` and `grad` may be
    /// the same memory.
    pub fn backward(&self, x: &Raw, grad: &Raw, statistics: &HeadStatistics, dx: &Raw) -> Result<()> {
        on_device!(
            x.device(),
            cuda => cuda::backward(self, [x, grad], statistics.first(), dx),
            cpu => self.backward_on_cpu([x, grad], statistics, dx),
        )
    }

    /// The index of the first head, and the number of heads, of queries (`index` 0), keys (1) or values (2).
    const fn range(&self, index: usize) -> [usize; 2] {
        let [heads, key_heads] = self.heads;
        match index {
            0 => [0, heads],
            1 => [heads, key_heads],
            _ => [heads + key_heads, key_heads],
        }
    }

    /// How many of the three parts (queries, keys, values) `y` has: two or three.
    fn parts(&self, y: &Raw) -> usize {
        if y.dims()[2] > self.heads[0] + self.heads[1] { 3 } else { 2 }
    }

    /// The columns of `x` that hold queries (`index` 0), keys (1) or values (2), as a dense tensor (B, S, heads,
    /// width).
    fn part(&self, x: &Raw, index: usize) -> Result<Raw> {
        let [first, heads] = self.range(index);
        let columns = contiguous(&x.narrow(2, first * self.width, heads * self.width)?)?;
        Ok(columns.reshape((x.dims()[0], x.dims()[1], heads, self.width))?)
    }

    /// cos and sin; if nothing is rotated, tables of one row for all tokens, with angle 0: cos = 1, sin = 0.
    fn tables_or_identity(&self, x: &Raw) -> Result<[Raw; 2]> {
        if let Some([cos, sin]) = self.tables {
            return Ok([cos.clone(), sin.clone()]);
        }
        let table = |value| compute::full(value, &[1, self.width / 2], DType::F64, x.device());
        Ok([table(1.0)?, table(0.0)?])
    }

    fn forward_on_cpu(&self, x: &Raw, y: &Raw) -> Result<HeadStatistics> {
        let [cos, sin] = self.tables_or_identity(x)?;
        let mut statistics = HeadStatistics::new();
        for index in 0..self.parts(y) {
            let ([first, heads], part) = (self.range(index), self.part(x, index)?);
            let rotation = Rotation { tables: [&cos, &sin], repeats: heads, interleaved: self.interleaved };
            let result = match self.eps {
                // Values are neither normalised nor rotated.
                _ if index == 2 => part,
                Some(eps) => {
                    let [rotated, rstd] = cpu::forward(self.op, &part, self.weights[index], &rotation, eps)?;
                    statistics.push(rstd);
                    rotated
                }
                None => rotation.rotate(&part, /* back */ false)?,
            };
            compute::copy_into(&y.narrow(2, first, heads)?, &result)?;
        }
        Ok(statistics)
    }

    fn backward_on_cpu(&self, [x, grad]: [&Raw; 2], statistics: &HeadStatistics, dx: &Raw) -> Result<()> {
        let [cos, sin] = self.tables_or_identity(x)?;
        for index in 0..self.parts(grad) {
            let [first, heads] = self.range(index);
            let rotation = Rotation { tables: [&cos, &sin], repeats: heads, interleaved: self.interleaved };
            let grad = contiguous(&grad.narrow(2, first, heads)?)?;
            let grad_x = match statistics.get(index) {
                // Values are neither normalised nor rotated.
                _ if index == 2 => grad,
                Some(rstd) => {
                    let saved = [&self.part(x, index)?, &grad, rstd];
                    cpu::input_gradient(self.op, saved, self.weights[index], &rotation)?
                }
                None => rotation.rotate(&grad, /* back */ true)?,
            };
            let columns = dx.narrow(2, first * self.width, heads * self.width)?;
            compute::copy_into(&columns, &grad_x.reshape(columns.shape())?)?;
        }
        Ok(())
    }
}
