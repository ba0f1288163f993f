//! [`Lanes`], registers for the steps of optimizers with 8-bit states, on processors with AVX-512 and VBMI. A register
//! has 16 values of f32. The values of a state's codes are looked up 64 at a time. The traits [`Lanes`] and
//! [`Registers`] say what their methods compute.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _CMP_GT_OQ, _CMP_LE_OQ, _mm_storeu_si128, _mm512_abs_ps, _mm512_add_epi32,
    _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cmplt_epu16_mask, _mm512_cvtepi32_epi8, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_add_epi32, _mm512_mask_blend_epi8, _mm512_mask_blend_ps, _mm512_mask_sub_epi32, _mm512_maskz_mov_ps,
    _mm512_max_epi32, _mm512_max_ps, _mm512_min_epi32, _mm512_min_epu16, _mm512_min_ps, _mm512_movepi8_mask,
    _mm512_movepi32_mask, _mm512_mul_ps, _mm512_mulhi_epu16, _mm512_permutex2var_epi8, _mm512_permutexvar_epi32,
    _mm512_permutexvar_ps, _mm512_reduce_max_ps, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setr_epi32, _mm512_sqrt_ps, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_unpackhi_epi8,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi8, _mm512_unpacklo_epi16,
};

use super::{Lanes, WithLanes};
use crate::optim::codes::{self, Registers, ZERO};
use crate::optim::quant::{BLOCK_SIZE, Codebook};

const WIDTH: usize = 16;

/// A token that can exist only on a processor with AVX-512 and VBMI.
#[derive(Clone, Copy)]
pub(in crate::optim) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        let is_supported = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vbmi");
        is_supported.then_some(Self(()))
    }

    pub(super) fn run(self, operation: impl WithLanes) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vbmi")]
        fn enabled(lanes: Avx512, operation: impl WithLanes) {
            operation.run(lanes);
        }
        // SAFETY: the processor has the instructions.
        unsafe { enabled(self, operation) }
    }

    /// Looks up the bytes of a table at 64 indices.
    #[inline(always)]
    fn look_up_bytes(self, table: &[u8; 256], indices: __m512i) -> __m512i {
        // SAFETY: the processor has the instructions; each load takes 64 of the table's 256 bytes.
        unsafe {
            let a = _mm512_loadu_si512(table.as_ptr().cast());
            let b = _mm512_loadu_si512(table.as_ptr().add(64).cast());
            let c = _mm512_loadu_si512(table.as_ptr().add(128).cast());
            let d = _mm512_loadu_si512(table.as_ptr().add(192).cast());
            // Each permutation uses the lower seven bits of an index. The highest bit then selects a half of the table.
            let low = _mm512_permutex2var_epi8(a, indices, b);
            let high = _mm512_permutex2var_epi8(c, indices, d);
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(indices), low, high)
        }
    }

    /// Looks up the values of the first 64 codes. Each of a value's four bytes comes from a separate table of 256
    /// bytes: `planes[i]` has byte i, from the lowest, of the value of each code.
    ///
    /// This is faster than gathers, because a gather of 16 values takes 16 loads, whereas one `vpermi2b` looks up 64
    /// bytes in half of a table.
    #[inline(always)]
    fn look_up_values(self, planes: &[[u8; 256]; 4], codes: &[u8]) -> [__m512; 4] {
        let codes = &codes[..4 * WIDTH];
        // SAFETY: the processor has the instructions; 64 bytes are loaded from a slice of 64.
        unsafe {
            // Unpacking takes each 128-bit quarter of its result from the same quarter of its operands. A quarter holds
            // four groups of four codes. These 4 x 4 groups are therefore transposed first, so that the unpacked values
            // are in order.
            let transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let indices = _mm512_permutexvar_epi32(transposed, _mm512_loadu_si512(codes.as_ptr().cast()));
            let (b0, b1) = (self.look_up_bytes(&planes[0], indices), self.look_up_bytes(&planes[1], indices));
            let (b2, b3) = (self.look_up_bytes(&planes[2], indices), self.look_up_bytes(&planes[3], indices));
            let (low01, high01) = (_mm512_unpacklo_epi8(b0, b1), _mm512_unpackhi_epi8(b0, b1));
            let (low23, high23) = (_mm512_unpacklo_epi8(b2, b3), _mm512_unpackhi_epi8(b2, b3));
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(low01, low23)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(low01, low23)),
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(high01, high23)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(high01, high23)),
            ]
        }
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

impl Lanes for Avx512 {
    type Values = __m512;
    type Mask = __mmask16;
    type Decoded = [__m512; 4];
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsics!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        let from = &from[..WIDTH];
        // SAFETY: the slice has as many values as are loaded.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32]) {
        let to = &mut to[..WIDTH];
        // SAFETY: the slice has as many values as are stored.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsics!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn sqrt(self, x: __m512) -> __m512 {
        intrinsics!(_mm512_sqrt_ps(x))
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        intrinsics!(_mm512_abs_ps(x))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn max_bits(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))))
    }

    #[inline(always)]
    fn at_most(self, a: __m512, b: __m512) -> __mmask16 {
        intrinsics!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b))
    }

    #[inline(always)]
    fn all_at_most(self, a: __m512, b: __m512) -> bool {
        self.at_most(a, b) == 0xffff
    }

    #[inline(always)]
    fn select(self, mask: __mmask16, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn or_zero(self, mask: __mmask16, x: __m512) -> __m512 {
        intrinsics!(_mm512_maskz_mov_ps(mask, x))
    }

    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        intrinsics!(_mm512_reduce_max_ps(x))
    }

    #[inline(always)]
    fn decode(self, codebook: &Codebook, codes: &[u8]) -> Self::Decoded {
        self.look_up_values(codebook.planes(), codes)
    }

    #[inline(always)]
    fn part(self, _: &Codebook, decoded: Self::Decoded, _: &[u8], index: usize) -> __m512 {
        decoded[index]
    }

    #[inline(always)]
    fn encode(self, codebook: &Codebook, values: &[f32; BLOCK_SIZE], scale: f32, codes: &mut [u8; BLOCK_SIZE]) {
        codes::encode(self, codebook, values, scale, codes);
    }
}

impl Registers for Avx512 {
    type Bits = __m512i;

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        intrinsics!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn bits(self, x: __m512) -> __m512i {
        intrinsics!(_mm512_castps_si512(x))
    }

    #[inline(always)]
    fn upper_times(self, x: __m512i, factor: u16) -> __m512i {
        // `mulhi` multiplies both 16-bit halves of each element; the shift keeps the result for the upper half.
        let factor = intrinsics!(_mm512_set1_epi16(factor.cast_signed()));
        intrinsics!(_mm512_srli_epi32::<16>(_mm512_mulhi_epu16(x, factor)))
    }

    #[inline(always)]
    fn double(self, x: __m512i) -> __m512i {
        intrinsics!(_mm512_add_epi32(x, x))
    }

    #[inline(always)]
    fn pick(self, table: __m512, index: __m512i) -> __m512 {
        // The instruction uses the lowest four bits of an index. The lowest three are enough to find the entry, because
        // the table of eight values is stored twice.
        intrinsics!(_mm512_permutexvar_ps(index, table))
    }

    #[inline(always)]
    fn count_above(self, index: __m512i, a: __m512, b: __m512) -> __m512i {
        intrinsics!(_mm512_mask_add_epi32(index, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), index, _mm512_set1_epi32(1)))
    }

    #[inline(always)]
    fn any_fraction_below(self, limit: u16, numbers: [__m512i; 4]) -> bool {
        // Compares the 16-bit halves of all elements. The lower half is the fraction. The upper half is never below the
        // limit, even for the whole part 0, because it also has the exponent of an f32 (see `base` in `codes.rs`).
        let smaller = |a, b| intrinsics!(_mm512_min_epu16(a, b));
        let [a, b, c, d] = numbers;
        let least = smaller(smaller(a, b), smaller(c, d));
        intrinsics!(_mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(limit.cast_signed())) != 0)
    }

    #[inline(always)]
    fn write<const SIGNED: bool>(self, numbers: [__m512i; 4], values: [__m512; 4], codes: &mut [u8]) {
        // A number n is the position of a magnitude among those of the codebook, from 0 for zero. Without `SIGNED`, n
        // is the code. With `SIGNED`, the code is ZERO + n for a positive value and ZERO - n for a negative one.
        let (codes, _) = codes[..4 * WIDTH].as_chunks_mut::<WIDTH>();
        for ((codes, number), value) in codes.iter_mut().zip(numbers).zip(values) {
            // SAFETY: the processor has the instructions; 16 bytes are stored to a slice of 16.
            unsafe {
                // The number is in bits 16 to 23, which become the lowest byte.
                let number = _mm512_srli_epi32::<16>(number);
                let mut result = number;
                if SIGNED {
                    // The clamp needs the number without the bits above it, which are an f32's exponent.
                    let number = _mm512_and_si512(number, _mm512_set1_epi32(0xff));
                    let zero = _mm512_set1_epi32(i32::from(ZERO));
                    let negative = _mm512_movepi32_mask(_mm512_castps_si512(value));
                    // Clamps the numbers of negative values to [1, ZERO], because a negative value must not get the
                    // code of zero, and no code represents -1: the magnitude 1 has the number ZERO + 1, and codes begin
                    // at 0.
                    let clamped = _mm512_min_epi32(_mm512_max_epi32(number, _mm512_set1_epi32(1)), zero);
                    result = _mm512_mask_sub_epi32(_mm512_add_epi32(number, zero), negative, zero, clamped);
                }
                // Stores the lowest byte of each result.
                _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(result));
            }
        }
    }
}
