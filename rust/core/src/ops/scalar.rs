//! Arithmetic of a tensor and numbers: each function applies to all elements, with the same one or two numbers. A
//! functor's `impl Unary` is the function; its `impl Binary`, if any, is the gradient of the input `x` for the gradient
//! `g` of the result.

#[cfg(feature = "testing")]
use super::case::{Case, Domain, Entry};
use super::elementwise::{Pointwise, pointwise};
use super::integer;
use crate::cpu::{Binary, Real, Unary};
use crate::raw::is_float;
use crate::tape::{Backward, BackwardContext, OpInfo, record};
use crate::{Error, Result, Tensor, compute};

/// For all functions that are an [`Affine`]; errors of all of them start with this name.
static SCALAR: OpInfo = OpInfo::cheap("mul_scalar");
static POW_SCALAR: OpInfo = OpInfo::cheap("pow_scalar");
static CLAMP: OpInfo = OpInfo::cheap("clamp");

/// x · `mul` + `add`.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    mul: f64,
    add: f64,
}

impl Affine {
    pub(super) const fn times(mul: f64) -> Self {
        Self { mul, add: 0.0 }
    }
}

impl Unary for Affine {
    const KERNEL: &'static str = "affine";

    fn parameters(&self) -> [f64; 2] {
        [self.mul, self.add]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x * R::from_f64(self.mul) + R::from_f64(self.add)
    }
}

/// The backward pass of [`Affine`]. The field is the factor `mul`; the gradient does not depend on `add`.
struct AffineBackward(f64);

impl Backward for AffineBackward {
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()> {
        let grad =
            if self.0 == 1.0 { context.grad().clone() } else { compute::unary(context.grad(), Affine::times(self.0))? };
        context.add(0, grad)
    }
}

/// x to the power of a number, the field.
#[derive(Clone, Copy)]
struct PowScalar(f64);

impl Unary for PowScalar {
    const KERNEL: &'static str = "pow_scalar";

    fn parameters(&self) -> [f64; 2] {
        [self.0, /* not used: */ 0.0]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        x.powf(R::from_f64(self.0))
    }
}

impl Binary for PowScalar {
    const KERNEL: &'static str = "pow_scalar_backward";

    fn parameters(&self) -> [f64; 2] {
        [self.0, /* not used: */ 0.0]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        // x^0 is constant. Without this case, x = 0 would give 0 * infinity, which is NaN.
        if self.0 == 0.0 { R::ZERO } else { g * R::from_f64(self.0) * x.powf(R::from_f64(self.0 - 1.0)) }
    }
}

impl Pointwise for PowScalar {
    const SAVES_RESULT: bool = false;
}

/// x, limited to the range from `low` to `high`.
#[derive(Clone, Copy)]
struct Clamp {
    low: f64,
    high: f64,
}

impl Unary for Clamp {
    const KERNEL: &'static str = "clamp";

    fn parameters(&self) -> [f64; 2] {
        [self.low, self.high]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, x: R) -> R {
        // Comparisons with NaN are false, so NaN stays NaN.
        let (low, high) = (R::from_f64(self.low), R::from_f64(self.high));
        let x = if x < low { low } else { x };
        if x > high { high } else { x }
    }
}

impl Binary for Clamp {
    const KERNEL: &'static str = "clamp_backward";

    fn parameters(&self) -> [f64; 2] {
        [self.low, self.high]
    }

    #[inline(always)]
    fn apply<R: Real>(&self, g: R, x: R) -> R {
        if x < R::from_f64(self.low) || x > R::from_f64(self.high) { R::ZERO } else { g }
    }
}

impl Pointwise for Clamp {
    const SAVES_RESULT: bool = false;
}

impl Tensor {
    /// `self * mul + add`.
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn affine(&self, mul: f64, add: f64) -> Result<Self> {
        if !is_float(self.dtype()) {
            return Err(Error::dtype(
                SCALAR.name,
                format!("expected a floating point tensor, found {}; convert it with to()", self.dtype().as_str()),
            ));
        }
        // `record` passes the last closure a `Saver` of tensors and the result. The backward pass needs neither.
        record(&SCALAR, &[self], || compute::unary(&self.raw, Affine { mul, add }), |_, _| AffineBackward(mul))
    }

    /// Adds a number to each element.
    ///
    /// # Errors
    /// As [`affine`](Self::affine).
    pub fn add_scalar(&self, value: f64) -> Result<Self> {
        self.affine(1.0, value)
    }

    /// Multiplies each element by a number.
    ///
    /// # Errors
    /// As [`affine`](Self::affine).
    pub fn mul_scalar(&self, value: f64) -> Result<Self> {
        self.affine(value, 0.0)
    }

    /// Each element with the opposite sign.
    ///
    /// # Errors
    /// [`Error::DType`] for unsigned integers, which have no negative.
    pub fn neg(&self) -> Result<Self> {
        if !is_float(self.dtype()) {
            return integer::neg(self);
        }
        self.affine(-1.0, 0.0)
    }

    /// Each element to the power of a number.
    ///
    /// # Errors
    /// [`Error::DType`] if the tensor is not floating point.
    pub fn pow_scalar(&self, exponent: f64) -> Result<Self> {
        if exponent == 2.0 {
            return self.sqr();
        }
        pointwise(&POW_SCALAR, self, PowScalar(exponent))
    }

    /// Limits each element to `[low, high]`. An element outside this range has gradient 0.
    ///
    /// # Errors
    /// [`Error::Argument`] if neither limit is given, a limit is NaN, or `low > high`; [`Error::DType`] if the tensor
    /// is not floating point.
    pub fn clamp(&self, low: Option<f64>, high: Option<f64>) -> Result<Self> {
        let limits = Clamp { low: low.unwrap_or(f64::NEG_INFINITY), high: high.unwrap_or(f64::INFINITY) };
        if low.is_none() && high.is_none() {
            return Err(Error::argument("clamp", "found no limits, expected a lower limit, an upper limit or both"));
        }
        if limits.low.is_nan() || limits.high.is_nan() {
            let which = if limits.low.is_nan() { "lower" } else { "upper" };
            return Err(Error::argument("clamp", format!("the {which} limit is NaN, expected a number")));
        }
        if limits.low > limits.high {
            return Err(Error::argument(
                "clamp",
                format!("the lower limit is {}, expected at most the upper limit {}", limits.low, limits.high),
            ));
        }
        pointwise(&CLAMP, self, limits)
    }
}

/// Registry entries of this file. A case has a label, the shapes of its inputs, and the call to test.
#[cfg(feature = "testing")]
pub static ENTRIES: &[Entry] = &[
    Entry {
        info: &SCALAR,
        cases: || {
            vec![
                Case::new("affine", &[&[3, 5]], |x| x[0].affine(-1.5, 0.25)),
                Case::new("empty", &[&[0]], |x| x[0].affine(2.0, 1.0)),
            ]
        },
    },
    Entry {
        info: &POW_SCALAR,
        cases: || vec![Case::new("2.5", &[&[7]], |x| x[0].pow_scalar(2.5)).domain(Domain::Positive)],
    },
    Entry {
        info: &CLAMP,
        // The distinct values are odd multiples of 0.25, at least 0.04 away from the limits. So the gradient's finite
        // differences cross no limit.
        cases: || vec![Case::new("both", &[&[9]], |x| x[0].clamp(Some(-0.55), Some(0.71))).domain(Domain::Distinct)],
    },
];
