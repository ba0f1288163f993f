//! [`Lanes`], arithmetic on several f32 values at once, for any processor. The values are in arrays, which the compiler
//! may put into registers.

use super::Lanes;
use crate::optim::quant::{BLOCK_SIZE, Codebook};

const WIDTH: usize = 8;

/// The token of this implementation. Other tokens show that the processor has certain instructions; this one needs
/// none.
#[derive(Clone, Copy)]
pub(super) struct Plain;

/// Calls `f` with the index of each value of a register, and returns the results.
#[inline(always)]
fn each<T>(f: impl FnMut(usize) -> T) -> [T; WIDTH] {
    std::array::from_fn(f)
}

impl Lanes for Plain {
    type Values = [f32; WIDTH];
    type Mask = [bool; WIDTH];
    /// Empty: `decode` does nothing, and [`part`](Lanes::part) looks up the values of codes.
    type Decoded = ();
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Values {
        [x; WIDTH]
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::Values {
        each(|i| from[i])
    }

    #[inline(always)]
    fn store(self, x: Self::Values, to: &mut [f32]) {
        to[..WIDTH].copy_from_slice(&x);
    }

    #[inline(always)]
    fn add(self, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Values, b: Self::Values, c: Self::Values) -> Self::Values {
        each(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn div(self, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn sqrt(self, x: Self::Values) -> Self::Values {
        x.map(f32::sqrt)
    }

    #[inline(always)]
    fn abs(self, x: Self::Values) -> Self::Values {
        x.map(f32::abs)
    }

    #[inline(always)]
    fn max(self, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    // Compares the bits as integers, not the numbers with `max`: a NaN whose sign bit is 0 must count as larger than
    // all numbers, and as an integer its bits are larger than theirs.
    #[inline(always)]
    fn max_bits(self, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| f32::from_bits(a[i].to_bits().cast_signed().max(b[i].to_bits().cast_signed()).cast_unsigned()))
    }

    #[inline(always)]
    fn at_most(self, a: Self::Values, b: Self::Values) -> Self::Mask {
        each(|i| a[i] <= b[i])
    }

    #[inline(always)]
    fn all_at_most(self, a: Self::Values, b: Self::Values) -> bool {
        self.at_most(a, b).into_iter().all(|at_most| at_most)
    }

    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::Values, b: Self::Values) -> Self::Values {
        each(|i| if mask[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn or_zero(self, mask: Self::Mask, x: Self::Values) -> Self::Values {
        each(|i| if mask[i] { x[i] } else { 0.0 })
    }

    #[inline(always)]
    fn largest(self, x: Self::Values) -> f32 {
        // The values are at least 0, so the initial value 0.0 changes nothing.
        x.into_iter().fold(0.0, f32::max)
    }

    #[inline(always)]
    fn decode(self, _: &Codebook, _: &[u8]) {}

    #[inline(always)]
    fn part(self, codebook: &Codebook, (): (), codes: &[u8], index: usize) -> Self::Values {
        each(|i| codebook.decode(codes[index * WIDTH + i]))
    }

    #[inline(always)]
    fn encode(self, codebook: &Codebook, values: &[f32; BLOCK_SIZE], scale: f32, codes: &mut [u8; BLOCK_SIZE]) {
        codebook.encode_each(values, scale, codes);
    }
}
