//! Reductions over any set of dimensions: sum, mean and variance; in submodules maximum, minimum and log-sum-exp. Also
//! cumulative sums.
//!
//! The argument `dims` of a reduction names dimensions in any order, each at most once. If `dims` is empty, each
//! element is reduced by itself. With `keepdim`, the reduced dimensions stay, with size 1. Floating-point elements are
//! summed in f32 (in f64 for f64 elements), and the sum is rounded once to the elements' dtype.

mod extreme;
mod logsumexp;

#[cfg(feature = "testing")]
use super::case::{Case, Domain, Entry};
use super::index::select_raw;
use crate::cpu::{self, Real, Ternary, Unary};
use crate::raw::{Raw, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record, record_with_aux};
use crate::{DType, Error, Result, Tensor, compute};

static SUM: OpInfo = OpInfo::cheap("sum");
static MEAN: OpInfo = OpInfo::cheap("mean");
static VAR: OpInfo = OpInfo::cheap("var");
static CUMSUM: OpInfo = OpInfo::cheap("cumsum");

/// Multiplication by a constant.
#[derive(Clone, Copy)]
struct Scale(f64);

impl Unary for Scale {
    const KERNEL: &'static str = "scale";

    fn parameters(&self) -> [f64; 2] {
        // Every elementwise kernel has two parameters; this one does not use the second.
        [self.0, 0.0]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x * R::from_f64(self.0)
    }
}

/// The shapes of a reduction's input and result.
#[derive(Clone)]
struct Reduction {
    /// The reduced dimensions, ascending.
    dims: Vec<usize>,
    /// The input's shape.
    input: Vec<usize>,
    /// The input's shape with size 1 for the reduced dimensions.
    keepdim_shape: Vec<usize>,
    /// Number of input elements for each element of the result.
    count: usize,
}

impl Reduction {
    /// The reduction of a floating-point `x` over `dims`. Another dtype, a dimension that `x` does not have, or one
    /// that is named twice is an error.
    fn of_floats(op: &'static str, x: &Tensor, dims: &[usize]) -> Result<Self> {
        if !is_float(x.dtype()) {
            return Err(Error::dtype(
                op,
                format!("expected a floating point tensor, found {}; convert it with to()", x.dtype().as_str()),
            ));
        }
        Self::of(op, x, dims)
    }

    /// The reduction of `x`, of any dtype, over `dims`. A dimension that `x` does not have, or one that is named twice,
    /// is an error.
    fn of(op: &'static str, x: &Tensor, dims: &[usize]) -> Result<Self> {
        let input = x.dims().to_vec();
        let mut keepdim_shape = input.clone();
        let mut sorted = dims.to_vec();
        sorted.sort_unstable();
        for (i, &dim) in sorted.iter().enumerate() {
            if dim >= input.len() {
                return Err(Error::index(op, format!("dimension {dim} is out of range for shape {input:?}")));
            }
            if i > 0 && sorted[i - 1] == dim {
                return Err(Error::argument(op, format!("dimension {dim} is named twice in {dims:?}")));
            }
            keepdim_shape[dim] = 1;
        }
        let count = sorted.iter().map(|&d| input[d]).product();
        Ok(Self { dims: sorted, input, keepdim_shape, count })
    }

    /// The input's shape without the reduced dimensions.
    fn squeezed_shape(&self) -> Vec<usize> {
        (0..self.input.len()).filter(|dim| !self.dims.contains(dim)).map(|dim| self.input[dim]).collect()
    }

    /// Broadcasts `value`, which has one element for each element of the result, to the input's shape. This is a view
    /// of `value`.
    fn spread(&self, value: &Raw) -> Result<Raw> {
        Ok(value.reshape(self.keepdim_shape.as_slice())?.broadcast_as(self.input.as_slice())?)
    }
}

/// The dtype in which sums of `dtype` elements are computed.
const fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// The backward pass of `sum` and `mean`: every input element gets the gradient of its result times `scale`.
struct SumBackward {
    reduction: Reduction,
    scale: f64,
}

impl Backward for SumBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad = context.grad();
        let grad = if self.scale == 1.0 { grad.clone() } else { compute::unary(grad, Scale(self.scale))? };
        context.add(0, self.reduction.spread(&grad)?)
    }
}

/// a (b - c). In the backward pass of a variance over n elements, b is one of these elements, c is their mean, and a is
/// 2 / (n - correction) times the gradient of the variance. The result is then the gradient of b.
#[derive(Clone, Copy)]
struct TimesDifference;

impl Ternary for TimesDifference {
    const KERNEL: &'static str = "times_difference";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R, c: R) -> R {
        a * (b - c)
    }
}

/// (a - b)².
#[derive(Clone, Copy)]
struct SquaredDifference;

impl cpu::Binary for SquaredDifference {
    const KERNEL: &'static str = "squared_difference";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R) -> R {
        (a - b) * (a - b)
    }
}

struct VarBackward {
    reduction: Reduction,
    x: Saved,
    /// In the accumulator dtype; the reduced dimensions have size 1.
    mean: Saved,
    /// The number of elements that one variance is over, minus the correction; at least 0.
    divisor: f64,
}

impl Backward for VarBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let dtype = context.grad().dtype();
        let acc = accumulator(dtype);
        let grad = compute::unary(&compute::cast(context.grad(), acc)?, Scale(2.0 / self.divisor))?;
        let x = compute::cast(&self.x.get()?, acc)?;
        let grad = compute::ternary(&self.reduction.spread(&grad)?, &x, &self.mean.get()?, TimesDifference)?;
        context.add(0, compute::cast(&grad, dtype)?)
    }
}

struct CumsumBackward {
    dim: usize,
}

impl Backward for CumsumBackward {
    /// Input element i is a term of the results i, i + 1, ..., so its gradient is the sum of the gradients of these
    /// results.
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let size = context.grad().dims()[self.dim];
        let descending: Vec<i64> = (0..size as i64).rev().collect();
        let descending = Raw::from_vec(descending, size, context.grad().device())?;
        let reversed = select_raw(CUMSUM.name, context.grad(), &descending, self.dim)?;
        let sums = compute::cumsum(&reversed, self.dim)?;
        context.add(0, select_raw(CUMSUM.name, &sums, &descending, self.dim)?)
    }
}

impl Tensor {
    fn all_dims(&self) -> Vec<usize> {
        (0..self.rank()).collect()
    }

    /// The sum over `dims`; 0 over no elements. The sum of integers is i64, as in torch.
    ///
    /// # Errors
    /// [`Error::Index`] if a dimension is out of range, [`Error::Argument`] if a dimension is named twice.
    pub fn sum(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        if !is_float(self.dtype()) {
            return self.sum_integers(dims, keepdim);
        }
        let reduction = Reduction::of_floats(SUM.name, self, dims)?;
        record(
            &SUM,
            &[self],
            || compute::sum(&self.raw, &reduction.dims, keepdim),
            |_, _| SumBackward { reduction: reduction.clone(), scale: 1.0 },
        )
    }

    fn sum_integers(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        let dims = Reduction::of(SUM.name, self, dims)?.dims;
        let wide = self.raw.to_dtype(DType::I64)?;
        Ok(Self::constant(if keepdim { wide.sum_keepdim(dims)? } else { wide.sum(dims)? }))
    }

    /// The sum of all elements.
    ///
    /// # Errors
    /// Errors of the device, such as [`Error::OutOfMemory`].
    pub fn sum_all(&self) -> Result<Self> {
        self.sum(&self.all_dims(), false)
    }

    /// The mean over `dims`; NaN over no elements.
    ///
    /// # Errors
    /// As [`sum`](Self::sum), and [`Error::DType`] if the tensor is not floating point.
    pub fn mean(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        let reduction = Reduction::of_floats(MEAN.name, self, dims)?;
        record(
            &MEAN,
            &[self],
            || compute::mean(&self.raw, &reduction.dims, keepdim),
            |_, _| SumBackward { scale: 1.0 / reduction.count as f64, reduction: reduction.clone() },
        )
    }

    /// The mean of all elements.
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn mean_all(&self) -> Result<Self> {
        self.mean(&self.all_dims(), false)
    }

    /// The variance over `dims`: the sum of squared distances from the mean, divided by the number of elements minus
    /// `correction` (1: the unbiased estimate). If this divisor is not positive, the variance is NaN or infinite, as in
    /// torch.
    ///
    /// # Errors
    /// As [`sum`](Self::sum), and [`Error::DType`] if the tensor is not floating point.
    pub fn var(&self, dims: &[usize], keepdim: bool, correction: f64) -> Result<Self> {
        let reduction = Reduction::of_floats(VAR.name, self, dims)?;
        let divisor = (reduction.count as f64 - correction).max(0.0);
        record_with_aux(
            &VAR,
            &[self],
            || {
                let x = compute::cast(&self.raw, accumulator(self.dtype()))?;
                let mean = compute::mean(&x, &reduction.dims, true)?;
                let squares = compute::sum(&compute::binary(&x, &mean, SquaredDifference)?, &reduction.dims, keepdim)?;
                let variance = compute::unary(&squares, Scale(1.0 / divisor))?;
                Ok((compute::cast(&variance, self.dtype())?, [mean].into_iter().collect()))
            },
            |saver, _, aux| VarBackward {
                reduction: reduction.clone(),
                x: saver.save(self),
                mean: saver.save_raw(&aux[0]),
                divisor,
            },
        )
    }

    /// The cumulative sums along `dim`: element i of the result is the sum of the elements 0 to i, both included.
    ///
    /// # Errors
    /// [`Error::Index`] if the dimension is out of range, [`Error::DType`] if the tensor is not floating point.
    pub fn cumsum(&self, dim: usize) -> Result<Self> {
        // A cumulative sum is no reduction, but needs the same checks of the dtype and of `dim`.
        Reduction::of_floats(CUMSUM.name, self, &[dim])?;
        record(&CUMSUM, &[self], || compute::cumsum(&self.raw, dim), |_, _| CumsumBackward { dim })
    }
}

/// Registry entries of this file and its submodules. A case has a label, the shapes of the inputs and the call to test.
/// `Domain::Distinct` gives an input distinct values, so that only one element is the maximum or the minimum.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &SUM,
        cases: || {
            vec![
                Case::new("all", &[&[3, 5]], |x| x[0].sum_all()),
                Case::new("first and last", &[&[3, 4, 5]], |x| x[0].sum(&[2, 0], false)),
                Case::new("keepdim", &[&[3, 4, 5]], |x| x[0].sum(&[1], true)),
                Case::new("scalar", &[&[]], |x| x[0].sum_all()),
                Case::new("over no elements", &[&[3, 0]], |x| x[0].sum(&[1], false)),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].sum(&[], false)),
            ]
        },
    },
    Entry {
        info: &MEAN,
        cases: || {
            vec![
                Case::new("all", &[&[3, 5]], |x| x[0].mean_all()),
                Case::new("first and last", &[&[3, 4, 5]], |x| x[0].mean(&[0, 2], false)),
                Case::new("keepdim", &[&[3, 4, 5]], |x| x[0].mean(&[1], true)),
                Case::new("empty", &[&[0, 4]], |x| x[0].mean(&[1], false)),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].mean(&[], true)),
            ]
        },
    },
    Entry {
        info: &VAR,
        cases: || {
            let plain = |x: &Tensor, dims: &[usize], keepdim: bool, divisor: f64| {
                x.sub(&x.mean(dims, true)?)?.sqr()?.sum(dims, keepdim)?.mul_scalar(1.0 / divisor)
            };
            // The divisor of a plain form is the number of reduced elements, 3 · 5, minus the correction.
            vec![
                Case::new("all", &[&[3, 5]], |x| x[0].var(&[0, 1], false, 1.0))
                    .plain(move |x| plain(&x[0], &[0, 1], false, 14.0)),
                Case::new("keepdim, no correction", &[&[3, 4, 5]], |x| x[0].var(&[0, 2], true, 0.0))
                    .plain(move |x| plain(&x[0], &[0, 2], true, 15.0)),
                Case::new("empty", &[&[0, 4]], |x| x[0].var(&[1], false, 1.0)),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].var(&[], false, 0.0)),
            ]
        },
    },
    Entry {
        info: &extreme::MAX,
        cases: || {
            vec![
                Case::new("one dimension", &[&[3, 4, 5]], |x| x[0].max(&[1], false)).domain(Domain::Distinct),
                Case::new("two dimensions, keepdim", &[&[3, 4, 5]], |x| x[0].max(&[0, 2], true))
                    .domain(Domain::Distinct),
                Case::new("all", &[&[3, 5]], |x| x[0].max_all()).domain(Domain::Distinct),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].max(&[], false)).domain(Domain::Distinct),
                Case::new("empty", &[&[0, 4]], |x| x[0].max(&[1], true)).domain(Domain::Distinct),
            ]
        },
    },
    Entry {
        info: &extreme::MIN,
        cases: || {
            vec![
                Case::new("one dimension, keepdim", &[&[3, 4, 5]], |x| x[0].min(&[2], true)).domain(Domain::Distinct),
                Case::new("two dimensions", &[&[3, 4, 5]], |x| x[0].min(&[0, 1], false)).domain(Domain::Distinct),
                Case::new("all", &[&[3, 5]], |x| x[0].min_all()).domain(Domain::Distinct),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].min(&[], false)).domain(Domain::Distinct),
            ]
        },
    },
    Entry {
        info: &logsumexp::LOGSUMEXP,
        cases: || {
            let plain = |x: &Tensor, dims: &[usize], keepdim: bool| x.exp()?.sum(dims, keepdim)?.log();
            vec![
                Case::new("last", &[&[3, 5]], |x| x[0].logsumexp(&[1], false))
                    .plain(move |x| plain(&x[0], &[1], false)),
                Case::new("first and last, keepdim", &[&[3, 4, 5]], |x| x[0].logsumexp(&[0, 2], true))
                    .plain(move |x| plain(&x[0], &[0, 2], true)),
                Case::new("empty", &[&[0, 4]], |x| x[0].logsumexp(&[1], false)),
                Case::new("over no dimensions", &[&[3, 5]], |x| x[0].logsumexp(&[], false)),
            ]
        },
    },
    Entry {
        info: &CUMSUM,
        cases: || {
            vec![
                Case::new("last", &[&[3, 5]], |x| x[0].cumsum(1)),
                Case::new("middle", &[&[2, 3, 4]], |x| x[0].cumsum(1)),
                Case::new("empty", &[&[3, 0]], |x| x[0].cumsum(1)),
            ]
        },
    },
];

#[cfg(test)]
mod tests;
