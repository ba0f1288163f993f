//! [`Lanes`]: an interface to registers of f32. The step of an optimizer with 8-bit states uses the interface and is
//! thus written only once for all processors. A state is stored as codes, the indices of values in a [`Codebook`].
//! There are implementations for AVX-512, for AVX2 and for all other processors. All round in the same way, so all give
//! equal states and parameters, bit for bit.
//!
//! Plain loops would be slower: the compiler vectorises their arithmetic, but not the look-ups of codes before and
//! after it. The compiler also turns a conditional store into a masked store, which takes AMD's processors 42
//! micro-operations.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod plain;

use super::quant::{BLOCK_SIZE, Codebook};

/// A token which shows that this processor has an instruction set. The methods are the instruction set's operations on
/// registers of `WIDTH` values; comparisons and arithmetic apply to each of the values.
///
/// All methods must be inlined into the operation of [`with_lanes`], because the instruction set is enabled only there.
pub(super) trait Lanes: Copy {
    /// A register of `WIDTH` values.
    type Values: Copy;
    /// A boolean for each of the values.
    type Mask: Copy;
    /// What [`decode`](Self::decode) returns: four registers of values, of which [`part`](Self::part) returns one; or
    /// nothing, if `part` looks up the values itself.
    type Decoded: Copy;
    /// The number of values in a register, at most 16. [`BLOCK_SIZE`] is a multiple of `4 * WIDTH`.
    const WIDTH: usize;

    /// Fills a register with `x`.
    fn splat(self, x: f32) -> Self::Values;
    /// Loads the first `WIDTH` values of a slice.
    fn load(self, from: &[f32]) -> Self::Values;
    /// Writes `x` to the first `WIDTH` values of a slice.
    fn store(self, x: Self::Values, to: &mut [f32]);
    fn add(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn mul(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Values, b: Self::Values, c: Self::Values) -> Self::Values;
    fn div(self, a: Self::Values, b: Self::Values) -> Self::Values;
    fn sqrt(self, x: Self::Values) -> Self::Values;
    fn abs(self, x: Self::Values) -> Self::Values;
    /// The larger of two numbers; `b` if one is NaN.
    fn max(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// The value whose bits, as a signed integer, are larger. Of two magnitudes this is the larger one, and a NaN
    /// without a sign counts as larger than all numbers. -0 counts as smaller than all magnitudes.
    fn max_bits(self, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `a <= b`; false if one is NaN.
    fn at_most(self, a: Self::Values, b: Self::Values) -> Self::Mask;
    /// Whether `a <= b` for all values; false if one is NaN.
    fn all_at_most(self, a: Self::Values, b: Self::Values) -> bool;
    /// `a` where `mask` is true, otherwise `b`.
    fn select(self, mask: Self::Mask, a: Self::Values, b: Self::Values) -> Self::Values;
    /// `x` where `mask` is true, otherwise 0.
    fn or_zero(self, mask: Self::Mask, x: Self::Values) -> Self::Values;
    /// The largest of the values, which must be at least 0.
    fn largest(self, x: Self::Values) -> f32;

    /// Looks up the values of the first `4 * WIDTH` codes, or does nothing in an implementation whose
    /// [`part`](Self::part) looks them up.
    fn decode(self, codebook: &Codebook, codes: &[u8]) -> Self::Decoded;
    /// Returns the values of the `WIDTH` codes from `index * WIDTH` on; `index` is less than 4. `decoded` is what
    /// [`decode`](Self::decode) has returned for `codes`.
    fn part(self, codebook: &Codebook, decoded: Self::Decoded, codes: &[u8], index: usize) -> Self::Values;
    /// Writes the codes of `values * scale` to `codes`. The products must be finite and, up to a few roundings, in
    /// [-1, 1]. With a codebook without negative values, they must be in [0, 1].
    fn encode(self, codebook: &Codebook, values: &[f32; BLOCK_SIZE], scale: f32, codes: &mut [u8; BLOCK_SIZE]);
}

/// An operation that runs with any implementation of [`Lanes`].
pub(super) trait WithLanes {
    fn run<L: Lanes>(self, lanes: L);
}

/// Runs an operation with the [`Lanes`] of the widest registers that this processor has. The method `run` of `Avx512`
/// and `Avx2` runs the operation with the instruction set enabled.
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
pub(super) fn with_all_lanes(operation: impl WithLanes + Copy) {
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
