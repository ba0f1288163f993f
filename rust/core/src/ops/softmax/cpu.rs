//! The CPU form of softmax and log-softmax. It works row by row, so that a row stays in the cache between the loops
//! over its elements.

use std::mem::MaybeUninit;

use super::super::rows;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// Softmax or log-softmax of one row.
pub(super) trait RowFunction: Copy + Send + Sync + 'static {
    /// Writes the result for the row `x` to `out`. `scratch` has the length of the row; its values may be overwritten.
    fn forward<T: Elem>(&self, x: &[T], scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]);
    /// Writes the gradient of the row `x` to `out`, from the result `y` and the gradient `g` of the result.
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]);
}

#[derive(Clone, Copy)]
pub(super) struct Softmax;

impl RowFunction for Softmax {
    #[inline(always)]
    fn forward<T: Elem>(&self, x: &[T], scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]) {
        let max = rows::max(x);
        for (exp, x) in scratch.iter_mut().zip(x) {
            *exp = (x.to_acc() - max).exp();
        }
        let scale = T::Acc::ONE / rows::sum(scratch, |exp| exp);
        for (out, exp) in out.iter_mut().zip(scratch) {
            out.write(T::from_acc(*exp * scale));
        }
    }

    /// The gradient is y (g - Σ g y), with the sum over the row.
    #[inline(always)]
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]) {
        let dot = rows::sum_pairs(y, g, |y: T, g: T| y.to_acc() * g.to_acc());
        for (out, (y, g)) in out.iter_mut().zip(y.iter().zip(g)) {
            out.write(T::from_acc(y.to_acc() * (g.to_acc() - dot)));
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct LogSoftmax;

impl RowFunction for LogSoftmax {
    #[inline(always)]
    fn forward<T: Elem>(&self, x: &[T], _scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]) {
        let max = rows::max(x);
        let log_sum = rows::sum(x, |x: T| (x.to_acc() - max).exp()).ln();
        for (out, x) in out.iter_mut().zip(x) {
            out.write(T::from_acc(x.to_acc() - max - log_sum));
        }
    }

    /// The gradient is g - e^y Σ g, with the sum over the row.
    #[inline(always)]
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]) {
        let sum = rows::sum(g, |g: T| g.to_acc());
        for (out, (y, g)) in out.iter_mut().zip(y.iter().zip(g)) {
            out.write(T::from_acc(g.to_acc() - y.to_acc().exp() * sum));
        }
    }
}

/// `function` over the last dimension of a dense tensor. `op` is the operation's name, for errors.
pub(super) fn forward<F: RowFunction>(op: &'static str, x: &Raw, function: F) -> Result<Raw> {
    let len = x.dims()[x.rank() - 1];
    let row_count = x.elem_count() / len.max(1);
    dispatch_float!(x.dtype(), op, T => read_all(op, &[x], |operands| {
        let x = elements::<T>(operands[0])?;
        // SAFETY: the function writes every element of each row.
        let y = unsafe {
            rows::fill_rows::<T>(row_count, len, rows::rows_per_block(len), |row_range, out| {
                let mut scratch = vec![<T as Elem>::Acc::ZERO; len];
                let x = &x[row_range.start * len..row_range.end * len];
                dispatch(
                    #[inline(always)]
                    || {
                        for (x, out) in x.chunks_exact(len).zip(out.chunks_exact_mut(len)) {
                            function.forward(x, &mut scratch, out);
                        }
                    },
                );
            })
        };
        Ok(y)
    })
    .map(|y| from_vec(y, x.shape())))
}

/// The gradient of the argument `x` of [`forward`], from the result `y` of `forward` and the gradient `g` of `y`. `y`
/// and `g` are dense.
pub(super) fn backward<F: RowFunction>(op: &'static str, y: &Raw, g: &Raw, function: F) -> Result<Raw> {
    let len = y.dims()[y.rank() - 1];
    let row_count = y.elem_count() / len.max(1);
    dispatch_float!(y.dtype(), op, T => read_all(op, &[y, g], |operands| {
        let (y, g) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
        // SAFETY: the function writes every element of each row.
        let grad = unsafe {
            rows::fill_rows::<T>(row_count, len, rows::rows_per_block(len), |row_range, out| {
                let range = row_range.start * len..row_range.end * len;
                let (y, g) = (&y[range.clone()], &g[range]);
                dispatch(
                    #[inline(always)]
                    || {
                        let inputs = y.chunks_exact(len).zip(g.chunks_exact(len));
                        for ((y, g), out) in inputs.zip(out.chunks_exact_mut(len)) {
                            function.backward(y, g, out);
                        }
                    },
                );
            })
        };
        Ok(grad)
    })
    .map(|grad| from_vec(grad, y.shape())))
}
