//! Losses of the difference of two tensors: squared, absolute, Huber and smooth absolute.

#[cfg(feature = "cuda")]
mod cuda;

use super::super::linear::same_kind;
use super::super::rows;
use super::Reduction;
use crate::compute::on_device;
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Binary, Elem, Real, Ternary, Unary, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec, is_float};
use crate::tape::{Backward, BackwardContext, OpInfo, Saved, record};
use crate::{Error, Result, Tensor, compute, dispatch_float};

pub(super) static MSE: OpInfo = OpInfo::cheap("mse_loss");
pub(super) static L1: OpInfo = OpInfo::cheap("l1_loss");
pub(super) static HUBER: OpInfo = OpInfo::cheap("huber_loss");
pub(super) static SMOOTH_L1: OpInfo = OpInfo::cheap("smooth_l1_loss");

/// Number of elements that one thread sums at a time.
const GRAIN: usize = 32 * 1024;
/// Number of elements that are summed in the accumulator dtype. The sums of such blocks are added in f64.
const BLOCK: usize = 1024;

/// A loss of the difference d of two elements, with its derivative.
trait Distance: Copy + Send + Sync + 'static {
    /// The name of the kernel of the loss in `cuda/kernels/elementwise.cu`.
    const VALUE: &'static str;
    /// The name of the kernel of the derivative, in the same file.
    const SLOPE: &'static str;

    /// The |d| at which a loss with two formulas changes from one to the other; 0 for a loss with one formula.
    fn threshold(&self) -> f64 {
        0.0
    }

    /// The loss.
    fn value<R: Real>(&self, d: R) -> R;
    /// The derivative of the loss with respect to d.
    fn slope<R: Real>(&self, d: R) -> R;
}

#[derive(Clone, Copy)]
struct Square;

impl Distance for Square {
    const VALUE: &'static str = "square";
    const SLOPE: &'static str = "square_slope";

    #[inline(always)]
    fn value<R: Real>(&self, d: R) -> R {
        d * d
    }

    #[inline(always)]
    fn slope<R: Real>(&self, d: R) -> R {
        d + d
    }
}

#[derive(Clone, Copy)]
struct Absolute;

impl Distance for Absolute {
    const VALUE: &'static str = "absolute";
    const SLOPE: &'static str = "absolute_slope";

    #[inline(always)]
    fn value<R: Real>(&self, d: R) -> R {
        d.abs()
    }

    #[inline(always)]
    fn slope<R: Real>(&self, d: R) -> R {
        // 0 at 0; NaN stays NaN.
        if d > R::ZERO {
            R::ONE
        } else if d < R::ZERO {
            -R::ONE
        } else {
            d
        }
    }
}

#[derive(Clone, Copy)]
struct Huber {
    delta: f64,
}

impl Distance for Huber {
    const VALUE: &'static str = "huber";
    const SLOPE: &'static str = "huber_slope";

    fn threshold(&self) -> f64 {
        self.delta
    }

    #[inline(always)]
    fn value<R: Real>(&self, d: R) -> R {
        let (half, delta) = (R::from_f64(0.5), R::from_f64(self.delta));
        let magnitude = d.abs();
        if magnitude > delta { delta * (magnitude - half * delta) } else { half * d * d }
    }

    #[inline(always)]
    fn slope<R: Real>(&self, d: R) -> R {
        let delta = R::from_f64(self.delta);
        // Two comparisons clamp d so that NaN stays NaN.
        let d = if d > delta { delta } else { d };
        if d < -delta { -delta } else { d }
    }
}

/// [`Huber`] divided by its threshold.
#[derive(Clone, Copy)]
struct SmoothAbsolute {
    beta: f64,
}

impl Distance for SmoothAbsolute {
    const VALUE: &'static str = "smooth_absolute";
    const SLOPE: &'static str = "smooth_absolute_slope";

    fn threshold(&self) -> f64 {
        self.beta
    }

    #[inline(always)]
    fn value<R: Real>(&self, d: R) -> R {
        let (half, beta) = (R::from_f64(0.5), R::from_f64(self.beta));
        let magnitude = d.abs();
        if magnitude > beta { magnitude - half * beta } else { half * d * d / beta }
    }

    #[inline(always)]
    fn slope<R: Real>(&self, d: R) -> R {
        let scaled = d / R::from_f64(self.beta);
        let scaled = if scaled > R::ONE { R::ONE } else { scaled };
        if scaled < -R::ONE { -R::ONE } else { scaled }
    }
}

/// The loss of a pair of elements (a, b), as a function of a - b.
#[derive(Clone, Copy)]
struct Value<F>(F);

impl<F: Distance> Binary for Value<F> {
    const KERNEL: &'static str = F::VALUE;

    fn parameters(&self) -> [f64; 2] {
        // The kernels take two numbers; this one uses the first.
        [self.0.threshold(), 0.0]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, a: R, b: R) -> R {
        self.0.value(a - b)
    }
}

/// The gradient with respect to a of the loss of a pair of elements (a, b): g · `factor` · slope(a - b), where g is the
/// gradient of the result.
#[derive(Clone, Copy)]
struct Slope<F> {
    function: F,
    /// What the reduction multiplies each loss by.
    factor: f64,
}

impl<F: Distance> Ternary for Slope<F> {
    const KERNEL: &'static str = F::SLOPE;

    fn parameters(&self) -> [f64; 2] {
        [self.function.threshold(), self.factor]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, a: R, b: R) -> R {
        g * R::from_f64(self.factor) * self.function.slope(a - b)
    }
}

#[derive(Clone, Copy)]
struct Negative;

impl Unary for Negative {
    const KERNEL: &'static str = "negative";

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        -x
    }
}

/// The sum of the losses of all pairs of elements, without a tensor of the single losses.
fn sum<T: Elem, F: Distance>(a: &[T], b: &[T], function: F) -> f64 {
    let mut sums = vec![0f64; a.len().div_ceil(GRAIN)];
    par_chunks_mut(&mut sums, 1, |piece, sum| {
        let range = piece * GRAIN..a.len().min((piece + 1) * GRAIN);
        for (a, b) in a[range.clone()].chunks(BLOCK).zip(b[range].chunks(BLOCK)) {
            let block = dispatch(
                #[inline(always)]
                || rows::sum_pairs(a, b, |a: T, b: T| function.value(a.to_acc() - b.to_acc())),
            );
            sum[0] += block.to_f64();
        }
    });
    sums.iter().sum()
}

/// The sum of the losses times `factor`, as a scalar.
fn total<F: Distance>(op: &'static str, a: &Raw, b: &Raw, function: F, factor: f64) -> Result<Raw> {
    on_device!(
        a.device(),
        cuda => cuda::total(op, F::VALUE, [a, b], function.threshold(), factor),
        cpu => total_on_cpu(op, a, b, function, factor),
    )
}

fn total_on_cpu<F: Distance>(op: &'static str, a: &Raw, b: &Raw, function: F, factor: f64) -> Result<Raw> {
    let (a, b) = (compute::contiguous(a)?, compute::contiguous(b)?);
    let len = a.elem_count();
    dispatch_float!(a.dtype(), op, T => read_all(op, &[&a, &b], |operands| {
        // `elements` goes on to the end of the storage, which may hold more than the tensor's `len` elements.
        let total = sum(&elements::<T>(operands[0])?[..len], &elements::<T>(operands[1])?[..len], function);
        Ok(T::from_acc(Real::from_f64(factor * total)))
    })
    .map(|total| from_vec(vec![total], ())))
}

struct DistanceBackward<F> {
    function: F,
    factor: f64,
    input: Saved,
    target: Saved,
}

impl<F: Distance> Backward for DistanceBackward<F> {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let slope = Slope { function: self.function, factor: self.factor };
        // If the loss was reduced, the gradient of the result is a scalar, which `ternary` broadcasts.
        let grad = compute::ternary(context.grad(), &self.input.get()?, &self.target.get()?, slope)?;
        // Input 0 is `input`, input 1 `target`. `add` ignores a gradient that is not needed.
        if context.needs(1) {
            context.add(1, compute::unary(&grad, Negative)?)?;
        }
        context.add(0, grad)
    }
}

/// The loss `function` of `input` - `target`, reduced by `reduction`, as one operation.
fn distance(
    info: &'static OpInfo,
    input: &Tensor,
    target: &Tensor,
    reduction: Reduction,
    function: impl Distance,
) -> Result<Tensor> {
    let op = info.name;
    if input.dims() != target.dims() {
        return Err(Error::shape(
            op,
            format!("the input has shape {:?}, the target {:?}; expected the same shape", input.dims(), target.dims()),
        ));
    }
    same_kind(op, input, "target", target)?;
    if !is_float(input.dtype()) {
        return Err(Error::dtype(
            op,
            format!("expected floating point tensors, found {}; convert them with to()", input.dtype().as_str()),
        ));
    }
    let factor = match reduction {
        Reduction::Mean => 1.0 / input.elem_count() as f64,
        Reduction::Sum | Reduction::None => 1.0,
    };
    record(
        info,
        &[input, target],
        || match reduction {
            Reduction::None => compute::binary(&input.raw, &target.raw, Value(function)),
            Reduction::Mean | Reduction::Sum => total(op, &input.raw, &target.raw, function, factor),
        },
        |saver, _| DistanceBackward { function, factor, input: saver.save(input), target: saver.save(target) },
    )
}

/// The squared difference of `input` and `target` in each element, reduced by `reduction`.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Device`] if the shapes, dtypes or devices of the tensors differ;
/// [`Error::DType`] also if they are not floating point.
pub fn mse_loss(input: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    distance(&MSE, input, target, reduction, Square)
}

/// The absolute difference of `input` and `target` in each element, reduced by `reduction`. The gradient at a
/// difference of 0 is 0.
///
/// # Errors
/// As [`mse_loss`].
pub fn l1_loss(input: &Tensor, target: &Tensor, reduction: Reduction) -> Result<Tensor> {
    distance(&L1, input, target, reduction, Absolute)
}

/// The loss of Huber (1964, "Robust estimation of a location parameter") in each element, reduced by `reduction`: with
/// d = input - target, d²/2 up to |d| = `delta`, and `delta` (|d| - `delta`/2) beyond. Like torch's `huber_loss`,
/// it is not divided by `delta`.
///
/// # Errors
/// As [`mse_loss`], and [`Error::Argument`] if `delta` is not positive or is NaN.
pub fn huber_loss(input: &Tensor, target: &Tensor, delta: f64, reduction: Reduction) -> Result<Tensor> {
    if delta.is_nan() || delta <= 0.0 {
        return Err(Error::argument(HUBER.name, format!("delta is {delta}, expected a number above 0")));
    }
    distance(&HUBER, input, target, reduction, Huber { delta })
}

/// [`huber_loss`] divided by its threshold (Girshick 2015, arXiv:1504.08083): with d = input - target, d²/(2 `beta`) up
/// to |d| = `beta`, and |d| - `beta`/2 beyond. With a `beta` of 0 it is [`l1_loss`].
///
/// # Errors
/// As [`mse_loss`], and [`Error::Argument`] if `beta` is negative or NaN.
pub fn smooth_l1_loss(input: &Tensor, target: &Tensor, beta: f64, reduction: Reduction) -> Result<Tensor> {
    if beta.is_nan() || beta < 0.0 {
        return Err(Error::argument(SMOOTH_L1.name, format!("beta is {beta}, expected a number from 0 up")));
    }
    if beta == 0.0 {
        return distance(&SMOOTH_L1, input, target, reduction, Absolute);
    }
    distance(&SMOOTH_L1, input, target, reduction, SmoothAbsolute { beta })
}
