//! The logarithm of a sum of exponentials. It is computed as max + ln Σ e^(x - max), which does not overflow.

use super::{Reduction, accumulator};
use crate::cpu::{Binary, Real, Ternary, Unary};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record_with_aux};
use crate::{Result, Tensor, compute};

pub(super) static LOGSUMEXP: OpInfo = OpInfo::cheap("logsumexp");

/// x, but 0 if x is infinite. Applied to the maximum before it is subtracted from the elements, because ∞ - ∞ is
/// NaN.
#[derive(Clone, Copy)]
struct Finite;

impl Unary for Finite {
    const KERNEL: &'static str = "finite";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        if x.abs() == R::INFINITY { R::ZERO } else { x }
    }
}

/// e^(a - b).
#[derive(Clone, Copy)]
struct ExpDifference;

impl Binary for ExpDifference {
    const KERNEL: &'static str = "exp_difference";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R) -> R {
        (a - b).exp()
    }
}

/// (ln a) + b.
#[derive(Clone, Copy)]
struct LogPlus;

impl Binary for LogPlus {
    const KERNEL: &'static str = "log_plus";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R) -> R {
        a.ln() + b
    }
}

/// a e^(b - c): the gradient of the element b, where c is the log-sum-exp and a its gradient. If c is -∞, all elements
/// are -∞; the result is then 0, not NaN.
#[derive(Clone, Copy)]
struct TimesExpDifference;

impl Ternary for TimesExpDifference {
    const KERNEL: &'static str = "times_exp_difference";

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R, c: R) -> R {
        let c = if c == R::NEG_INFINITY { R::ZERO } else { c };
        a * (b - c).exp()
    }
}

struct LogsumexpBackward {
    reduction: Reduction,
    x: Saved,
    /// The result in the accumulator dtype (f64 for f64, otherwise f32); the reduced dimensions have size 1.
    result: Saved,
}

impl Backward for LogsumexpBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let dtype = context.grad().dtype();
        let acc = accumulator(dtype);
        // Each element of x gets the gradient of the result that it belongs to.
        let grad = self.reduction.spread(&compute::cast(context.grad(), acc)?)?;
        let x = compute::cast(&self.x.get()?, acc)?;
        let grad = compute::ternary(&grad, &x, &self.result.get()?, TimesExpDifference)?;
        context.add(0, compute::cast(&grad, dtype)?)
    }
}

/// The log-sum-exp in the accumulator dtype; the reduced dimensions have size 1.
fn forward(x: &Raw, reduction: &Reduction) -> Result<Raw> {
    let x = compute::cast(x, accumulator(x.dtype()))?;
    if reduction.count == 0 {
        // Each result is the logarithm of an empty sum.
        return compute::full(f64::NEG_INFINITY, &reduction.keepdim_shape, x.dtype(), x.device());
    }
    let keepdim = true;
    let largest = compute::unary(&compute::max(&x, &reduction.dims, keepdim)?, Finite)?;
    let sum = compute::sum(&compute::binary(&x, &largest, ExpDifference)?, &reduction.dims, keepdim)?;
    compute::binary(&sum, &largest, LogPlus)
}

impl Tensor {
    /// ln Σ e^x over `dims`; -∞ over no elements. Large elements do not overflow.
    ///
    /// # Errors
    /// As [`sum`](Self::sum), and [`Error::DType`](crate::Error::DType) if the tensor is not floating point.
    pub fn logsumexp(&self, dims: &[usize], keepdim: bool) -> Result<Self> {
        let reduction = Reduction::of_floats(LOGSUMEXP.name, self, dims)?;
        record_with_aux(
            &LOGSUMEXP,
            &[self],
            || {
                let wide = forward(&self.raw, &reduction)?;
                let result = compute::cast(&wide, self.dtype())?;
                let result = if keepdim { result } else { result.reshape(reduction.squeezed_shape())? };
                let aux = [wide].into_iter().collect();
                Ok((result, aux))
            },
            |saver, _result, aux| LogsumexpBackward {
                reduction: reduction.clone(),
                x: saver.save(self),
                result: saver.save_raw(&aux[0]),
            },
        )
    }
}
