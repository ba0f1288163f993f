//! Blocks of 8-bit codes in registers of AVX-512: 64 codes and their values at a time, without a load from a computed address.
//!
//! A gather of 16 values takes 16 loads and, on AMD's processors, about 80 micro-operations; a look-up in a table of 128 bytes by
//! `vpermi2b` takes one to three for 64 codes. A value is four such tables, one for each of its bytes.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_GE_OQ, _CMP_GT_OQ, _mm_storeu_si128, _mm512_abs_ps, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cvtepi32_epi8, _mm512_cvttps_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mask_add_epi8, _mm512_mask_add_epi32, _mm512_mask_blend_epi8, _mm512_max_epi32,
    _mm512_max_epu8, _mm512_min_epu8, _mm512_movepi8_mask, _mm512_movepi32_mask, _mm512_mul_ps,
    _mm512_permutex2var_epi8, _mm512_permutex2var_epi32, _mm512_permutex2var_ps, _mm512_permutexvar_epi32,
    _mm512_permutexvar_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32,
    _mm512_setzero_si512, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_epi32,
    _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpacklo_epi8, _mm512_unpacklo_epi16,
};

/// Biased exponent of the octave before the first that a decade begins in, 1e-6.
const FIRST_EXPONENT: i32 = 106;
/// Decades of the dynamic map; the last ends at 1.
const DECADES: usize = 7;
/// Where the middle of a code's range of magnitudes, zero, is in the map for values of both signs.
const ZERO: u8 = 127;

/// 256 values, the bytes of each in four tables.
struct Bytes([[u8; 256]; 4]);

impl Bytes {
    fn of(values: &[f32; 256]) -> Self {
        Self(std::array::from_fn(|plane| values.map(|value| value.to_bits().to_le_bytes()[plane])))
    }

    /// The values of 64 indices in the order of the indices.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn look_up(&self, indices: __m512i) -> [__m512; 4] {
        // Unpacking takes each quarter of its result from the same quarter of the bytes: transposed so that it comes out in order.
        let transposed = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let indices = _mm512_permutexvar_epi32(transposed, indices);
        let upper = _mm512_movepi8_mask(indices);
        let plane = |table: &[u8; 256]| {
            // SAFETY: each load takes 64 of the table's 256 bytes.
            let [a, b, c, d] = [0, 64, 128, 192].map(|at| unsafe { _mm512_loadu_si512(table.as_ptr().add(at).cast()) });
            let low = _mm512_permutex2var_epi8(a, indices, b);
            let high = _mm512_permutex2var_epi8(c, indices, d);
            _mm512_mask_blend_epi8(upper, low, high)
        };
        let [b0, b1, b2, b3] = [plane(&self.0[0]), plane(&self.0[1]), plane(&self.0[2]), plane(&self.0[3])];
        let (low, high) = (_mm512_unpacklo_epi8(b0, b1), _mm512_unpackhi_epi8(b0, b1));
        let (low2, high2) = (_mm512_unpacklo_epi8(b2, b3), _mm512_unpackhi_epi8(b2, b3));
        [
            _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, low2)),
            _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, low2)),
            _mm512_castsi512_ps(_mm512_unpacklo_epi16(high, high2)),
            _mm512_castsi512_ps(_mm512_unpackhi_epi16(high, high2)),
        ]
    }
}

/// A dynamic map in tables of registers.
pub(super) struct Registers {
    signed: bool,
    values: Bytes,
    /// By the number of a magnitude, counted from zero: the largest that is rounded to it.
    borders: Bytes,
    /// By octave: where a decade begins in it, and the decade that it begins with.
    starts: [f32; 32],
    decades: [i32; 32],
    /// By decade: the number of a magnitude is `slope * x + offset`, rounded down, or one more.
    slopes: [f32; 16],
    offsets: [f32; 16],
}

impl Registers {
    /// The tables of a map, if this processor has the instructions.
    ///
    /// `borders[code]` is the largest value that is not rounded to a larger code. With `signed`, the map has both signs and keeps
    /// them; otherwise values are at least 0.
    pub(super) fn new(signed: bool, values: &[f32; 256], borders: &[f32; 255]) -> Option<Self> {
        let there = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vbmi");
        if !there {
            return None;
        }
        let zero = if signed { usize::from(ZERO) } else { 0 };
        let mut magnitudes = [f32::INFINITY; 256];
        magnitudes[..255 - zero].copy_from_slice(&borders[zero..]);
        let end = |decade: usize| 10f64.powi(decade as i32 + 1 - DECADES as i32);
        let (mut starts, mut decades) = ([f32::INFINITY; 32], [0; 32]);
        for (octave, (start, first)) in starts.iter_mut().zip(&mut decades).enumerate() {
            let from = 2f64.powi(octave as i32 + FIRST_EXPONENT - 127);
            *first = (0..DECADES - 1).filter(|&d| end(d) < from).count() as i32;
            if let Some(inside) = (0..DECADES - 1).map(end).find(|&end| (from..2.0 * from).contains(&end)) {
                *start = inside as f32;
            }
        }
        let (mut slopes, mut offsets) = ([0.0; 16], [0.0; 16]);
        let mut before = 0.0;
        for decade in 0..DECADES {
            // `items` values, evenly spaced from a tenth of the end. Borders lie at whole steps, that to the decade before at 0.2
            // or earlier: 0.21 less finds the number or, up to there, one less.
            let items = f64::from(1u32 << (decade + usize::from(!signed)));
            slopes[decade] = (items / (0.9 * end(decade))) as f32;
            offsets[decade] = (before - items / 9.0 + 0.79) as f32;
            before += items;
        }
        let (values, borders) = (Bytes::of(values), Bytes::of(&magnitudes));
        Some(Self { signed, values, borders, starts, decades, slopes, offsets })
    }

    /// The values of a block of codes.
    #[inline]
    pub(super) fn decode<const N: usize>(&self, codes: &[u8; N]) -> [f32; N] {
        // SAFETY: there are no tables unless the processor has the instructions.
        unsafe { self.decode_wide(codes) }
    }

    /// The codes of a block of finite `values * scale`, which lie within a few roundings of [-1, 1], or [0, 1].
    #[inline]
    pub(super) fn encode<const N: usize>(&self, values: &[f32; N], scale: f32) -> [u8; N] {
        // SAFETY: there are no tables unless the processor has the instructions.
        unsafe { self.encode_wide(values, scale) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vbmi")]
    fn decode_wide<const N: usize>(&self, codes: &[u8; N]) -> [f32; N] {
        const { assert!(N.is_multiple_of(64)) };
        let mut values = [0.0; N];
        for (values, codes) in values.as_chunks_mut::<64>().0.iter_mut().zip(codes.as_chunks::<64>().0) {
            // SAFETY: 64 bytes are loaded of 64.
            let codes = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
            for (values, part) in values.as_chunks_mut::<16>().0.iter_mut().zip(self.values.look_up(codes)) {
                // SAFETY: 16 values are stored to 16.
                unsafe { _mm512_storeu_ps(values.as_mut_ptr(), part) };
            }
        }
        values
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vbmi")]
    fn encode_wide<const N: usize>(&self, values: &[f32; N], scale: f32) -> [u8; N] {
        const { assert!(N.is_multiple_of(64)) };
        let scale = _mm512_set1_ps(scale);
        // SAFETY: each load takes 16 values, of arrays of 16 or at an offset of 16 in one of 32, or of chunks of 16.
        let load = |from: &[f32]| unsafe { _mm512_loadu_ps(from[..16].as_ptr()) };
        // SAFETY: as above.
        let load_whole = |from: &[i32]| unsafe { _mm512_loadu_si512(from[..16].as_ptr().cast()) };
        let (starts, starts2) = (load(&self.starts), load(&self.starts[16..]));
        let (decades, decades2) = (load_whole(&self.decades), load_whole(&self.decades[16..]));
        let (slopes, offsets) = (load(&self.slopes), load(&self.offsets));
        let mut codes = [0u8; N];
        for (codes, values) in codes.as_chunks_mut::<16>().0.iter_mut().zip(values.as_chunks::<16>().0) {
            let x = _mm512_abs_ps(_mm512_mul_ps(load(values), scale));
            let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(x));
            let octave = _mm512_sub_epi32(exponent, _mm512_set1_epi32(FIRST_EXPONENT));
            let octave = _mm512_max_epi32(octave, _mm512_setzero_si512());
            let start = _mm512_permutex2var_ps(starts, octave, starts2);
            let decade = _mm512_permutex2var_epi32(decades, octave, decades2);
            let later = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, start);
            let decade = _mm512_mask_add_epi32(decade, later, decade, _mm512_set1_epi32(1));
            let (slope, offset) = (_mm512_permutexvar_ps(decade, slopes), _mm512_permutexvar_ps(decade, offsets));
            let number = _mm512_cvttps_epi32(_mm512_fmadd_ps(x, slope, offset));
            // SAFETY: 16 bytes are stored to 16.
            unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(number)) };
        }
        for (codes, values) in codes.as_chunks_mut::<64>().0.iter_mut().zip(values.as_chunks::<64>().0) {
            // SAFETY: 64 bytes are loaded of 64.
            let number = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
            let (mut above, mut negative) = (0u64, 0u64);
            for (part, border) in self.borders.look_up(number).into_iter().enumerate() {
                let x = _mm512_mul_ps(load(&values[16 * part..]), scale);
                let beyond = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_abs_ps(x), border);
                above |= u64::from(beyond) << (16 * part);
                negative |= u64::from(_mm512_movepi32_mask(_mm512_castps_si512(x))) << (16 * part);
            }
            let one = _mm512_set1_epi8(1);
            let mut result = _mm512_mask_add_epi8(number, above, number, one);
            if self.signed {
                let zero = _mm512_set1_epi8(ZERO as i8);
                let positive = _mm512_sub_epi8(result, _mm512_set1_epi8((ZERO as i8).wrapping_neg()));
                // No code stands for -1, and negative values stay negative.
                let kept = _mm512_min_epu8(_mm512_max_epu8(result, one), zero);
                result = _mm512_mask_blend_epi8(negative, positive, _mm512_sub_epi8(zero, kept));
            }
            // SAFETY: 64 bytes are stored to 64.
            unsafe { _mm512_storeu_si512(codes.as_mut_ptr().cast(), result) };
        }
        codes
    }
}
