//! [`Lanes`] of AVX2 with FMA: operations on registers of 8 values, for optimizers with 8-bit states. With the
//! further operations of [`Registers`], [`codes::encode`] turns values into the 8-bit codes of the states. It numbers
//! the magnitudes that codes represent, from 0 for zero, and finds the number of the magnitude nearest to a value's;
//! this number and the value's sign give the code.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_LE_OQ, _mm256_add_epi8, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_blendv_epi8,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cmpeq_epi16, _mm256_cmpgt_epi32,
    _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_epi32, _mm256_max_epu8, _mm256_max_ps,
    _mm256_min_epi32, _mm256_min_epu8, _mm256_min_epu16, _mm256_movemask_epi8, _mm256_movemask_ps, _mm256_mul_ps,
    _mm256_mulhi_epu16, _mm256_packs_epi16, _mm256_packs_epi32, _mm256_permutevar8x32_epi32, _mm256_permutevar8x32_ps,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setr_ps,
    _mm256_shuffle_epi8, _mm256_sqrt_ps, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_epi8,
    _mm256_sub_epi32, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
};

use super::{Lanes, WithLanes};
use crate::optim::codes::{self, Registers, ZERO};
use crate::optim::quant::{BLOCK_SIZE, Codebook};

const WIDTH: usize = 8;

/// A token that can exist only on a processor with AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in crate::optim) struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }

    pub(super) fn run(self, operation: impl WithLanes) {
        #[target_feature(enable = "avx2,fma")]
        fn enabled(lanes: Avx2, operation: impl WithLanes) {
            operation.run(lanes);
        }
        // SAFETY: the processor has the instructions.
        unsafe { enabled(self, operation) }
    }
}

/// Evaluates an expression of intrinsics.
macro_rules! intrinsics {
    ($e:expr) => {{
        // SAFETY: the token `self` exists only if the processor has the instructions; these intrinsics access no
        // memory.
        unsafe { $e }
    }};
}

impl Lanes for Avx2 {
    type Values = __m256;
    type Mask = __m256;
    /// Empty: AVX2 has too few registers to hold the values of `4 * WIDTH` codes, so `part` looks up the values.
    type Decoded = ();
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        intrinsics!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        let from = &from[..WIDTH];
        // SAFETY: the slice has as many values as are loaded.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m256, to: &mut [f32]) {
        let to = &mut to[..WIDTH];
        // SAFETY: the slice has as many values as are stored.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        intrinsics!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn sqrt(self, x: __m256) -> __m256 {
        intrinsics!(_mm256_sqrt_ps(x))
    }

    #[inline(always)]
    fn abs(self, x: __m256) -> __m256 {
        intrinsics!(_mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX))))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_max_ps(a, b))
    }

    /// Compares the bits as signed integers, in which a NaN without a sign is larger than all numbers.
    #[inline(always)]
    fn max_bits(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))))
    }

    #[inline(always)]
    fn at_most(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b))
    }

    #[inline(always)]
    fn all_at_most(self, a: __m256, b: __m256) -> bool {
        intrinsics!(_mm256_movemask_ps(self.at_most(a, b)) == 0xff)
    }

    #[inline(always)]
    fn select(self, mask: __m256, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_blendv_ps(b, a, mask))
    }

    /// `x` where `mask` is true, otherwise 0.
    #[inline(always)]
    fn or_zero(self, mask: __m256, x: __m256) -> __m256 {
        intrinsics!(_mm256_and_ps(x, mask))
    }

    /// The values are at least 0.
    #[inline(always)]
    fn largest(self, x: __m256) -> f32 {
        let mut values = [0.0; WIDTH];
        self.store(x, &mut values);
        values.into_iter().fold(0.0, f32::max)
    }

    #[inline(always)]
    fn decode(self, _: &Codebook, _: &[u8]) {}

    /// The values of codes `index * WIDTH` to `index * WIDTH + 7`.
    #[inline(always)]
    fn part(self, codebook: &Codebook, (): (), codes: &[u8], index: usize) -> __m256 {
        let codes = &codes[index * WIDTH..][..WIDTH];
        let value = |i: usize| codebook.decode(codes[i]);
        // A gather would take AMD's processors more micro-operations than single loads.
        intrinsics!(_mm256_setr_ps(value(0), value(1), value(2), value(3), value(4), value(5), value(6), value(7)))
    }

    #[inline(always)]
    fn encode(self, codebook: &Codebook, values: &[f32; BLOCK_SIZE], scale: f32, codes: &mut [u8; BLOCK_SIZE]) {
        codes::encode(self, codebook, values, scale, codes);
    }
}

impl Registers for Avx2 {
    type Bits = __m256i;

    /// The values are magnitudes, which are in the order of their bits as integers.
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        intrinsics!(_mm256_castsi256_ps(_mm256_min_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))))
    }

    #[inline(always)]
    fn bits(self, x: __m256) -> __m256i {
        intrinsics!(_mm256_castps_si256(x))
    }

    /// (Upper 16 bits of each value, as an integer) · `factor` / 2^16.
    #[inline(always)]
    fn upper_times(self, x: __m256i, factor: u16) -> __m256i {
        // The product of the upper halves is in the upper half of each element, the shift moves it to the lower half.
        let factor = intrinsics!(_mm256_set1_epi16(factor.cast_signed()));
        intrinsics!(_mm256_srli_epi32::<16>(_mm256_mulhi_epu16(x, factor)))
    }

    #[inline(always)]
    fn double(self, x: __m256i) -> __m256i {
        intrinsics!(_mm256_add_epi32(x, x))
    }

    /// The value of `table` at each index; the instruction reads only the lowest three bits of an index.
    #[inline(always)]
    fn pick(self, table: __m256, index: __m256i) -> __m256 {
        intrinsics!(_mm256_permutevar8x32_ps(table, index))
    }

    /// `index`, plus one where the magnitude `a` is greater than `b`.
    #[inline(always)]
    fn count_above(self, index: __m256i, a: __m256, b: __m256) -> __m256i {
        // A comparison gives -1 where it is true.
        intrinsics!(_mm256_sub_epi32(index, _mm256_cmpgt_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))))
    }

    /// Bits 16 to 23 of each element of `numbers` are the number of a magnitude, and the lower 16 bits are the fraction
    /// that the number had before rounding. Returns whether any fraction is below `limit`. The upper 16 bits also have
    /// bits of an f32's exponent, so they are never below `limit`. The comparison of all 16-bit halves therefore finds
    /// only fractions.
    #[inline(always)]
    fn any_fraction_below(self, limit: u16, numbers: [__m256i; 4]) -> bool {
        let smaller = |a, b| intrinsics!(_mm256_min_epu16(a, b));
        let [a, b, c, d] = numbers;
        let least = smaller(smaller(a, b), smaller(c, d));
        // AVX2 has no `<` of unsigned integers; x < limit if min(x, limit - 1) == x.
        let below = intrinsics!(_mm256_cmpeq_epi16(smaller(least, _mm256_set1_epi16(limit.cast_signed() - 1)), least));
        intrinsics!(_mm256_movemask_epi8(below) != 0)
    }

    /// Writes the codes of `values`, whose magnitudes have the numbers in bits 16 to 23 of `numbers`. If `SIGNED`, the
    /// code of a value is [`ZERO`] plus or minus its number; otherwise it is the number.
    #[inline(always)]
    fn write<const SIGNED: bool>(self, numbers: [__m256i; 4], values: [__m256; 4], codes: &mut [u8]) {
        // SAFETY: the processor has the instructions; 32 bytes are stored to a slice of 32.
        unsafe {
            let codes = &mut codes[..4 * WIDTH];
            // Selects byte 2 (bits 16 to 23, the number) of each of the four 32-bit elements in a 128-bit half. The
            // shuffle and the unpacking take each half of a result from the same half of the operands, so the codes are
            // out of order until `in_order` sorts them at the end.
            let byte_2 = _mm256_set1_epi32(0x0e0a_0602);
            let [a, b, c, d] = numbers;
            let (a, b) = (_mm256_shuffle_epi8(a, byte_2), _mm256_shuffle_epi8(b, byte_2));
            let (c, d) = (_mm256_shuffle_epi8(c, byte_2), _mm256_shuffle_epi8(d, byte_2));
            let bytes = _mm256_unpacklo_epi64(_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let mut result = bytes;
            if SIGNED {
                let [a, b, c, d] = values;
                let (a, b) = (_mm256_castps_si256(a), _mm256_castps_si256(b));
                let (c, d) = (_mm256_castps_si256(c), _mm256_castps_si256(d));
                // Packing saturates, which keeps the sign bits, and puts them in the order of `bytes`.
                let signs = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
                let zero = _mm256_set1_epi8(ZERO as i8);
                // Clamps the numbers of negative values to [1, ZERO], because a negative value must not get the code of
                // zero, and no code represents -1 (number ZERO + 1).
                let clamped = _mm256_min_epu8(_mm256_max_epu8(bytes, _mm256_set1_epi8(1)), zero);
                result = _mm256_blendv_epi8(_mm256_add_epi8(bytes, zero), _mm256_sub_epi8(zero, clamped), signs);
            }
            let in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), _mm256_permutevar8x32_epi32(result, in_order));
        }
    }
}
