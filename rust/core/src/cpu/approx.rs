//! Elementary functions of f32 as branch-free polynomials. The compiler can vectorise them inside
//! [`dispatch`](super::simd::dispatch), unlike calls of the standard library's scalar functions.
//!
//! The coefficients are weighted minimax fits (Lawson's iteration on Chebyshev nodes) made for these functions. The
//! tests measure errors against f64; NaN, infinities, signed zeros and subnormal numbers behave as in IEEE 754, except
//! that [`sigmoid`] returns zero in place of some subnormal numbers.

use std::f32::consts::LOG2_E;

/// 1.5 * 2^23. Adding this constant to a number from -2^22 to 2^22 rounds the number to an integer, which is then in
/// the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
/// LN_2_HI + LN_2_LO = ln 2. LN_2_HI has so few bits that its product with an integer exponent of f32 is exact.
const LN_2_HI: f32 = 0.693_359_4;
const LN_2_LO: f32 = -2.121_944_4e-4;

/// Evaluates the polynomial with these coefficients, lowest power first.
#[inline(always)]
fn polynomial<const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut y = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        y = y.mul_add(x, coefficients[i]);
    }
    y
}

/// 2^k for -126 <= k <= 127.
#[inline(always)]
fn pow2(k: i32) -> f32 {
    f32::from_bits((k.wrapping_add(127) as u32) << 23)
}

/// e^x, within 1.5 ulp.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // From 89 on the result is infinity, below -104 it is zero. The comparisons let NaN pass through.
    let x = if x > 89.0 { 89.0 } else { x };
    let vanishes = x < -104.0;
    // Compute exp(0) instead of a result that rounds to zero: subnormal intermediate values are slow, and every masked
    // attention score would have them.
    let x = if vanishes { 0.0 } else { x };
    // e^x = 2^n * e^r, where n is the integer nearest to x / ln 2, and r = x - n * ln 2.
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LO, n.mul_add(-LN_2_HI, x));
    let p = polynomial(r, [0.5, 0.166_665_18, 0.041_666_202, 0.008_369_025, 0.001_395_072_3]);
    // e^r = 1 + r + r^2 * p(r)
    let y = (r * r).mul_add(p, r) + 1.0;
    // Multiply by 2^n in two factors, because n may be outside the range of f32's exponents.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let y = y * pow2(half) * pow2(n.wrapping_sub(half));
    if vanishes { 0.0 } else { y }
}

/// Natural logarithm, within 1.5 ulp.
#[inline(always)]
pub(super) fn ln(x: f32) -> f32 {
    // A subnormal number is multiplied by 2^23, which makes it normal. So are zero and negative numbers; the last lines
    // replace their results.
    let is_tiny = x < f32::MIN_POSITIVE;
    let scaled = if is_tiny { x * 8_388_608.0 } else { x };
    let shift = if is_tiny { -23.0 } else { 0.0 };
    // x = m * 2^k with m in [sqrt(1/2), sqrt(2)). With f = m - 1: ln x = k * ln 2 + f - f^2 / 2 + f^3 * p(f).
    let sqrt_half = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    // The difference of the bits of m * 2^k and of sqrt(1/2) has k in its exponent, and its lower 23 bits plus the bits
    // of sqrt(1/2) are those of m.
    let bits = scaled.to_bits().wrapping_sub(sqrt_half);
    let k = ((bits as i32) >> 23) as f32 + shift;
    let f = f32::from_bits((bits & 0x007f_ffff).wrapping_add(sqrt_half)) - 1.0;
    let s = f * f;
    let p = polynomial(
        f,
        [
            0.333_333_3,
            -0.250_008_3,
            0.200_012_45,
            -0.166_229_31,
            0.142_009_78,
            -0.131_638_29,
            0.127_692_85,
            -0.076_342_82,
        ],
    );
    let low = s.mul_add(-0.5, k.mul_add(LN_2_LO, s * f * p));
    let y = k.mul_add(LN_2_HI, f + low);
    // Infinity and NaN are their own logarithms.
    let y = if x < f32::INFINITY { y } else { x };
    let if_not_positive = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    if x > 0.0 { y } else { if_not_positive }
}

/// Hyperbolic tangent, within 1.5 ulp.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let a = x.abs();
    // Near zero, tanh a = a + a^3 * p(a^2), because 1 - 2 / (e^(2a) + 1) would lose digits there.
    let s = a * a;
    let p = polynomial(s, [-0.333_332_84, 0.133_314_91, -0.053_743_497, 0.020_650_584, -0.005_717_042]);
    let if_small = (s * p).mul_add(a, a);
    let if_large = 1.0 - 2.0 / (exp(a + a) + 1.0);
    let y = if a < 0.625 { if_small } else { if_large };
    y.copysign(x)
}

/// The distribution function of the standard normal distribution, with an absolute error of at most 1.5e-7. GELU uses
/// this function; the usual formula with 1 + erf is not more accurate, and needs an exponential.
#[inline(always)]
pub(super) fn normal_cdf(x: f32) -> f32 {
    // Beyond this bound the result is 0 or 1 to within 2e-8.
    const END: f32 = 5.5;
    // Map x² to [-1, 1], where a polynomial has small coefficients and terms do not cancel.
    let t = (x * x).mul_add(2.0 / (END * END), -1.0);
    let p = polynomial(
        t,
        [
            0.128_551_93,
            -0.064_172_48,
            0.047_736_99,
            -0.038_787_268,
            0.032_081_74,
            -0.026_112_469,
            0.020_287_983,
            -0.014_671_363,
            0.010_468_616,
            -0.007_674_675,
            0.004_236_389_4,
            -0.001_229_397_3,
            0.001_023_835_5,
            -0.001_368_830_6,
            0.000_538_080_8,
        ],
    );
    // The function minus 0.5 is odd, so it is x times a function of x².
    let y = p.mul_add(x, 0.5);
    let y = if x > END { 1.0 } else { y };
    if x < -END { 0.0 } else { y }
}

/// 1 / (1 + e^-x), within 2.5 ulp where the result is a normal number.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance of `got` from `exact` in units of the last place of f32 at `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        if got == rounded || (got.is_nan() && rounded.is_nan()) {
            return 0.0;
        }
        let size = rounded.abs().clamp(f32::MIN_POSITIVE, f32::MAX);
        // The distance to the next f32. At f32::MAX it is infinite, so the distance to the next lower number takes its
        // place.
        let unit = f64::from(f32::from_bits(size.to_bits() + 1) - size);
        (f64::from(got) - exact).abs() / if unit.is_finite() { unit } else { f64::from(size - size.next_down()) }
    }

    /// The largest error of `f` in ulp, and the number with this error. The numbers have every sign and exponent; NaN
    /// and infinities are among them.
    fn worst(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> (f64, f32) {
        let special =
            [0.0, f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), 1.0, 4.0, 0.9, 0.625];
        // Every 1009th f32, in the order of the bits.
        let spread = (0..=u32::MAX).step_by(1009).map(f32::from_bits);
        let from_minus_100_to_100 = (-2_000_000..2_000_000).map(|i| i as f32 * 1e-4 / 2.0);
        let mut worst = (0.0, 0.0);
        for x in special.into_iter().flat_map(|x: f32| [x, -x]).chain(spread).chain(from_minus_100_to_100) {
            let error = ulps(f(x), exact(f64::from(x)));
            assert!(!error.is_nan(), "at {x}: {} against {}", f(x), exact(f64::from(x)));
            if error > worst.0 {
                worst = (error, x);
            }
        }
        worst
    }

    #[test]
    fn exp_is_accurate() {
        let (error, at) = worst(exp, f64::exp);
        assert!(error <= 1.5, "{error} ulp at {at}");
    }

    #[test]
    fn ln_is_accurate() {
        let (error, at) = worst(ln, f64::ln);
        assert!(error <= 1.5, "{error} ulp at {at}");
    }

    #[test]
    fn tanh_is_accurate() {
        let (error, at) = worst(tanh, f64::tanh);
        assert!(error <= 1.5, "{error} ulp at {at}");
    }

    #[test]
    fn normal_cdf_is_accurate() {
        let exact = |x: f32| 0.5 * libm::erfc(-f64::from(x) * std::f64::consts::FRAC_1_SQRT_2);
        for x in (-2_000_000..2_000_000).map(|i| i as f32 * 1e-5) {
            let error = (f64::from(normal_cdf(x)) - exact(x)).abs();
            assert!(error <= 1.5e-7, "{error:e} at {x}");
        }
        assert_eq!((normal_cdf(f32::INFINITY), normal_cdf(f32::NEG_INFINITY)), (1.0, 0.0));
        assert_eq!((normal_cdf(f32::MAX), normal_cdf(f32::MIN), normal_cdf(0.0)), (1.0, 0.0, 0.5));
        assert!(normal_cdf(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_is_accurate() {
        // The exact result is subnormal below -87.3, and `sigmoid` gives zero below -88.7, where e^-x overflows. So the
        // comparison ends at -87.
        let (error, at) = worst(
            |x| sigmoid(if x < -87.0 { -87.0 } else { x }),
            |x| 1.0 / (1.0 + (-if x < -87.0 { -87.0 } else { x }).exp()),
        );
        assert!(error <= 2.5, "{error} ulp at {at}");
        assert_eq!(sigmoid(-100.0), 0.0);
    }

    #[test]
    fn results_at_zero_one_and_in_saturation_are_exact() {
        assert!(tanh(-0.0).is_sign_negative());
        assert_eq!((tanh(10.0), tanh(-10.0)), (1.0, -1.0));
        assert_eq!((exp(0.0), ln(1.0), sigmoid(0.0)), (1.0, 0.0, 0.5));
    }
}
