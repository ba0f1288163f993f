//! Softmax and its logarithm along a dimension, each a fused kernel of one pass over memory.

use std::mem::MaybeUninit;

use super::case::{Case, Entry};
use super::rows;
use crate::compute::contiguous;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::raw::{Raw, from_vec};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, dispatch_float};

static SOFTMAX: OpInfo = OpInfo::cheap("softmax");
static LOG_SOFTMAX: OpInfo = OpInfo::cheap("log_softmax");

/// What the two operations do with a row.
trait RowFunction: Copy + Send + Sync + 'static {
    /// The kernels of the two directions.
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2];

    /// The result for `x`; `scratch` is as long as the row.
    fn forward<T: Elem>(&self, x: &[T], scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]);
    /// The gradient of the row from the result `y` and its gradient `g`.
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]);
}

#[derive(Clone, Copy)]
struct Softmax;

impl RowFunction for Softmax {
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2] = ["softmax_forward", "softmax_backward"];

    #[inline(always)]
    fn forward<T: Elem>(&self, x: &[T], scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]) {
        let max = rows::max(x);
        for (e, x) in scratch.iter_mut().zip(x) {
            *e = (x.to_acc() - max).exp();
        }
        let scale = T::Acc::ONE / rows::sum(scratch, |e| e);
        for (o, e) in out.iter_mut().zip(scratch) {
            o.write(T::from_acc(*e * scale));
        }
    }

    /// y (g - Σ g y)
    #[inline(always)]
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]) {
        let dot = rows::sum_pairs(y, g, |y: T, g: T| y.to_acc() * g.to_acc());
        for (o, (y, g)) in out.iter_mut().zip(y.iter().zip(g)) {
            o.write(T::from_acc(y.to_acc() * (g.to_acc() - dot)));
        }
    }
}

#[derive(Clone, Copy)]
struct LogSoftmax;

impl RowFunction for LogSoftmax {
    #[cfg(feature = "cuda")]
    const KERNELS: [&'static str; 2] = ["log_softmax_forward", "log_softmax_backward"];

    #[inline(always)]
    fn forward<T: Elem>(&self, x: &[T], _scratch: &mut [T::Acc], out: &mut [MaybeUninit<T>]) {
        let max = rows::max(x);
        let log_sum = rows::sum(x, |x: T| (x.to_acc() - max).exp()).ln();
        for (o, x) in out.iter_mut().zip(x) {
            o.write(T::from_acc(x.to_acc() - max - log_sum));
        }
    }

    /// g - e^y Σ g
    #[inline(always)]
    fn backward<T: Elem>(&self, y: &[T], g: &[T], out: &mut [MaybeUninit<T>]) {
        let sum = rows::sum(g, |g: T| g.to_acc());
        for (o, (y, g)) in out.iter_mut().zip(y.iter().zip(g)) {
            o.write(T::from_acc(g.to_acc() - y.to_acc().exp() * sum));
        }
    }
}

/// The tensor with dimension `dim` last, contiguous.
fn as_rows(x: &Raw, dim: usize) -> Result<Raw> {
    contiguous(&x.transpose(dim, x.rank() - 1)?)
}

fn forward<F: RowFunction>(op: &'static str, x: &Raw, dim: usize, function: F) -> Result<Raw> {
    let last = x.rank() - 1;
    let x = as_rows(x, dim)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return Ok(cuda::rows::softmax(op, F::KERNELS[0], &x)?.transpose(dim, last)?);
    }
    let len = x.dims()[last];
    let rows = x.elem_count() / len.max(1);
    let y = dispatch_float!(x.dtype(), op, T => read_all(op, &[&x], |operands| {
        let x = elements::<T>(operands[0])?;
        // SAFETY: the function writes every element of each row.
        let y = unsafe {
            rows::fill_rows::<T>(rows, len, rows::rows_per_block(len), |range, out| {
                let mut scratch = vec![<T as Elem>::Acc::ZERO; len];
                let x = &x[range.start * len..range.end * len];
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
    .map(|y| from_vec(y, x.shape()))?);
    Ok(y.transpose(dim, last)?)
}

struct SoftmaxBackward<F> {
    y: Saved,
    dim: usize,
    op: &'static str,
    function: F,
}

impl<F: RowFunction> Backward for SoftmaxBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let (y, g) = (as_rows(&self.y.get()?, self.dim)?, as_rows(context.grad(), self.dim)?);
        let last = y.rank() - 1;
        #[cfg(feature = "cuda")]
        if y.device().is_cuda() {
            let grad = cuda::rows::softmax_backward(self.op, F::KERNELS[1], &y, &g)?;
            return context.add(0, grad.transpose(self.dim, last)?);
        }
        let len = y.dims()[last];
        let rows = y.elem_count() / len.max(1);
        let grad = dispatch_float!(y.dtype(), self.op, T => read_all(self.op, &[&y, &g], |operands| {
            let (y, g) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
            // SAFETY: the function writes every element of each row.
            let grad = unsafe {
                rows::fill_rows::<T>(rows, len, rows::rows_per_block(len), |range, out| {
                    let range = range.start * len..range.end * len;
                    let (y, g) = (&y[range.clone()], &g[range]);
                    dispatch(
                        #[inline(always)]
                        || {
                            let inputs = y.chunks_exact(len).zip(g.chunks_exact(len));
                            for ((y, g), out) in inputs.zip(out.chunks_exact_mut(len)) {
                                self.function.backward(y, g, out);
                            }
                        },
                    );
                })
            };
            Ok(grad)
        })
        .map(|grad| from_vec(grad, y.shape()))?);
        context.add(0, grad.transpose(self.dim, last)?)
    }
}

fn along<F: RowFunction>(info: &'static OpInfo, x: &Tensor, dim: usize, function: F) -> Result<Tensor> {
    let op = info.name;
    if dim >= x.rank() {
        return Err(Error::index(op, format!("dimension {dim} is out of range for shape {:?}", x.dims())));
    }
    record(
        info,
        &[x],
        || forward(op, &x.raw, dim, function),
        |saver, y| SoftmaxBackward { y: saver.save_raw(y), dim, op, function },
    )
}

impl Tensor {
    /// e^x / Σ e^x along dimension `dim`, whatever the size of x (the largest is taken off first). A row of negative infinities
    /// gives NaN, as in torch.
    ///
    /// # Errors
    /// [`Error::Index`] if `dim` is out of range, [`Error::DType`] if the tensor is not floating point.
    pub fn softmax(&self, dim: usize) -> Result<Self> {
        along(&SOFTMAX, self, dim, Softmax)
    }

    /// The logarithm of [`softmax`](Self::softmax), without the loss of small probabilities.
    ///
    /// # Errors
    /// As [`softmax`](Self::softmax).
    pub fn log_softmax(&self, dim: usize) -> Result<Self> {
        along(&LOG_SOFTMAX, self, dim, LogSoftmax)
    }
}

fn softmax_plain(x: &Tensor, dim: usize) -> Result<Tensor> {
    let e = x.exp()?;
    e.div(&e.sum(&[dim], true)?)
}

fn log_softmax_plain(x: &Tensor, dim: usize) -> Result<Tensor> {
    x.sub(&x.exp()?.sum(&[dim], true)?.log()?)
}

/// Registry entries of this file.
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &SOFTMAX,
        cases: || {
            vec![
                Case::new("last", &[&[3, 7]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                Case::new("long rows", &[&[2, 71]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                Case::new("middle", &[&[2, 5, 3]], |x| x[0].softmax(1)).plain(|x| softmax_plain(&x[0], 1)),
                Case::new("no rows", &[&[0, 3]], |x| x[0].softmax(1)),
                Case::new("empty rows", &[&[3, 0]], |x| x[0].softmax(1)),
            ]
        },
    },
    Entry {
        info: &LOG_SOFTMAX,
        cases: || {
            vec![
                Case::new("last", &[&[3, 7]], |x| x[0].log_softmax(1)).plain(|x| log_softmax_plain(&x[0], 1)),
                Case::new("long rows", &[&[2, 71]], |x| x[0].log_softmax(1)).plain(|x| log_softmax_plain(&x[0], 1)),
                Case::new("first", &[&[5, 3]], |x| x[0].log_softmax(0)).plain(|x| log_softmax_plain(&x[0], 0)),
                Case::new("no rows", &[&[0, 3]], |x| x[0].log_softmax(1)),
                Case::new("empty rows", &[&[3, 0]], |x| x[0].log_softmax(1)),
            ]
        },
    },
];
