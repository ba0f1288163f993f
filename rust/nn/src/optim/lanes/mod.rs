//! An interface to registers of f32, with which a step over 8-bit states is written once for all processors: those with
//! AVX-512, those with AVX2, and all others.
//!
//! The compiler vectorises the arithmetic of plain loops, but not the look-ups of codes before and after the arithmetic. The
//! compiler also turns a conditional store into a masked store, which takes AMD's processors 42 micro-operations. All
//! implementations of [`Lanes`] round in the same way, so that all give states and parameters that are equal bit for bit.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

use super::quant::{BLOCK_SIZE, Codebook};

/// A token of an instruction set that this processor has, with its operations on registers of `WIDTH` values.
///
/// All methods must be inlined into the operation of [`with_lanes`], because the instruction set is enabled only there.
pub(super) trait Lanes: Copy {
    /// `WIDTH` values.
    type Values: Copy;
    /// A boolean for each of the values.
    type Mask: Copy;
    /// The result of one look-up for four registers of codes.
    type Decoded: Copy;
    /// The number of values in a register, at most 16. A block consists of whole groups of four registers.
    const WIDTH: usize;

    fn splat(self, x: f32) -> Self::Values;
    /// The first values of a slice.
    fn load(self, from: &[f32]) -> Self::Values;
    /// Writes the first values of a slice.
    fn store(self, x: Self::Values, to: &mut [f32]);
    fn add(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn mul(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Values, b: Self::Values, c: Self::Values) -> Self::Values;
    fn div(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn sqrt(self, x: Self::Values) -> Self::Values;
    fn abs(self, x: Self::Values) -> Self::Values;
    /// The larger of two numbers; either of them if one is NaN.
    fn max(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// The value whose bits are the larger signed integer. Of two magnitudes this is the larger one, where a NaN is above
    /// all numbers. -0 is below all magnitudes.
    fn max_bits(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `a <= b`; false if one is NaN.
    fn at_most(self, a: Self::Values, b: Self::Values) -> Self::Mask;
    /// Whether `a <= b` for all values.
    fn all_at_most(self, a: Self::Values, b: Self::Values) -> bool;
    /// `a` where `mask` is true, otherwise `b`.
    fn select(self, mask: Self::Mask, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `x` where `mask` is true, otherwise 0.
    fn or_zero(self, mask: Self::Mask, x: Self::Values) -> Self::Values;
    /// The largest of the values, which are at least 0.
    fn largest(self, x: Self::Values) -> f32;

    /// Looks up `4 * WIDTH` codes.
    fn decode(self, codebook: &Codebook, codes: &[u8]) -> Self::Decoded;
    /// The values of register `index` of the four registers of `codes`, whose look-up returned `decoded`.
    fn part(self, codebook: &Codebook, decoded: Self::Decoded, codes: &[u8], index: usize) -> Self::Values;
    /// Writes the codes of `values * scale` to `codes`. The products must be finite and, up to a few roundings, in [-1, 1]
    /// or, in a map without negative values, in [0, 1].
    fn encode(self, codebook: &Codebook, values: &[f32; BLOCK_SIZE], scale: f32, codes: &mut [u8; BLOCK_SIZE]);
}

/// An operation for any [`Lanes`].
pub(super) trait WithLanes {
    fn run<L: Lanes>(self, lanes: L);
}

/// Runs an operation in the widest registers that this processor has.
pub(super) fn with_lanes(operation: impl WithLanes) {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(lanes) = avx512::Avx512::new() {
            return lanes.run(operation);
        }
        if let Some(lanes) = avx2::Avx2::new() {
            return lanes.run(operation);
        }
    }
    operation.run(plain::Plain);
}

/// Runs an operation with every implementation of [`Lanes`] that this processor supports.
#[cfg(test)]
pub(super) fn in_each_form(operation: impl WithLanes + Copy) {
    operation.run(plain::Plain);
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(lanes) = avx2::Avx2::new() {
            lanes.run(operation);
        }
        if let Some(lanes) = avx512::Avx512::new() {
            lanes.run(operation);
        }
    }
}
