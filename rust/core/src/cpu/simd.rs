//! Run-time SIMD dispatch on the CPU, and [`Real`]: the types of numbers (f32, f64) that CPU kernels are generic over.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};
use std::sync::LazyLock;

use super::approx;
use super::lane::Lane;

/// Runs `f` compiled for the widest instruction set that this processor has: AVX-512, AVX2 with FMA, NEON, or the
/// baseline of the target.
///
/// `f` is an ordinary loop over slices that the compiler vectorises. It must be written
/// `dispatch(#[inline(always)] || ...)`, and every function that it calls must be `#[inline(always)]` too, because a
/// function that is not inlined is compiled for the baseline. `f` must not start threads, whose code is not inlined
/// either.
#[inline(always)]
pub fn dispatch<R>(f: impl FnOnce() -> R) -> R {
    arch().dispatch(f)
}

/// Runs `operation`, which is written with explicit SIMD registers, compiled for the widest instruction set that this
/// processor has.
#[inline(always)]
pub(crate) fn vectorized<Op: pulp::WithSimd>(operation: Op) -> Op::Output {
    arch().dispatch(operation)
}

/// Returns the widest instruction set of this processor.
#[inline(always)]
pub(super) fn arch() -> pulp::Arch {
    static ARCH: LazyLock<pulp::Arch> = LazyLock::new(pulp::Arch::new);
    *ARCH
}

/// A type of arithmetic: f32, whose elementary functions vectorise, except those marked "not vectorised" below, or f64,
/// whose elementary functions are mostly those of the standard library.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + Lane
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// Negative infinity.
    const NEG_INFINITY: Self;
    /// Not a number.
    const NAN: Self;

    /// Rounds `x` to the nearest number of this type, ties to even.
    fn from_f64(x: f64) -> Self;
    /// The same number as f64.
    fn to_f64(self) -> f64;
    /// `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// The larger of `self` and `other`; NaN if either is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of `self` and `other`; NaN if either is NaN.
    fn min(self, other: Self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e^self.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The cumulative distribution function of the standard normal distribution; for f32 with an absolute error below
    /// 1.5e-7.
    fn normal_cdf(self) -> Self;
    /// 1 / (1 + e^-self).
    fn sigmoid(self) -> Self;
    /// Sine; not vectorised.
    fn sin(self) -> Self;
    /// Cosine; not vectorised.
    fn cos(self) -> Self;
    /// `self` to the power of `exponent`; not vectorised.
    fn powf(self, exponent: Self) -> Self;
    /// True for NaN.
    fn is_nan(self) -> bool;
}

/// Implements [`Real`] for the type `$t`. The paths are the functions that differ between f32 and f64.
macro_rules! real {
    ($t:ident, $exp:path, $ln:path, $tanh:path, $normal_cdf:path, $sigmoid:path) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = $t::INFINITY;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            const NAN: Self = $t::NAN;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                $t::mul_add(self, a, b)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                $t::abs(self)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other || $t::is_nan(self) { self } else { other }
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other || $t::is_nan(self) { self } else { other }
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $ln(self)
            }
            #[inline(always)]
            fn tanh(self) -> Self {
                $tanh(self)
            }
            #[inline(always)]
            fn normal_cdf(self) -> Self {
                $normal_cdf(self)
            }
            #[inline(always)]
            fn sigmoid(self) -> Self {
                $sigmoid(self)
            }
            #[inline(always)]
            fn sin(self) -> Self {
                $t::sin(self)
            }
            #[inline(always)]
            fn cos(self) -> Self {
                $t::cos(self)
            }
            #[inline(always)]
            fn powf(self, exponent: Self) -> Self {
                $t::powf(self, exponent)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                $t::is_nan(self)
            }
        }
    };
}

#[inline(always)]
fn sigmoid_f64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[inline(always)]
fn normal_cdf_f64(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

real!(f32, approx::exp, approx::ln, approx::tanh, approx::normal_cdf, approx::sigmoid);
real!(f64, f64::exp, f64::ln, f64::tanh, normal_cdf_f64, sigmoid_f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatch_gives_the_same_results_as_a_plain_loop() {
        // The length is no multiple of a register's number of lanes.
        let x: Vec<f32> = (0..1003).map(|i| i as f32 * 0.01 - 5.0).collect();
        let expected: Vec<f32> = x.iter().map(|&x| Real::normal_cdf(x)).collect();
        let mut dispatched = vec![0.0f32; x.len()];
        dispatch(
            #[inline(always)]
            || {
                for (y, &x) in dispatched.iter_mut().zip(&x) {
                    *y = Real::normal_cdf(x);
                }
            },
        );
        assert_eq!(dispatched, expected);
    }

    #[test]
    fn max_and_min_compare_numbers_and_pass_nan_on() {
        fn check<R: Real>() {
            let (one, two) = (R::ONE, R::from_f64(2.0));
            assert!(Real::max(one, two) == two && Real::max(two, one) == two);
            assert!(Real::min(one, two) == one && Real::min(two, one) == one);
            for (a, b) in [(R::NAN, one), (one, R::NAN)] {
                assert!(Real::max(a, b).is_nan() && Real::min(a, b).is_nan());
            }
        }
        check::<f32>();
        check::<f64>();
    }
}
