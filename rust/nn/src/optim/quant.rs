//! Block-wise 8-bit quantization of optimizer states, as bitsandbytes defines it.
//!
//! A block of values is divided by its largest magnitude, and each quotient is rounded to the nearest of 256 values,
//! the *dynamic map*. This map has more values near zero than near one, so that small states keep a relative precision
//! of a few percent.
//!
//! Dettmers et al., "8-bit Optimizers via Block-wise Quantization", <https://arxiv.org/abs/2110.02861>; the map, the
//! rounding of ties and the treatment of signs are those of bitsandbytes 0.50 (`create_dynamic_map`, `quantize_2D`).
//!
//! Follows <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/functional.py#L296>
//! and <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/csrc/kernels.cu#L223>.

use std::sync::LazyLock;

use trainable_candle_core::cpu::pool::par_chunks_mut;
pub use trainable_candle_core::quantized::create_dynamic_map;
use trainable_candle_core::{Error, Result};

#[cfg(target_arch = "x86_64")]
use super::codes::Lines;
use super::lanes::Lanes;

/// The number of elements of an optimizer state that share one scale.
pub const BLOCK_SIZE: usize = 256;

/// The number of elements that one thread quantizes or dequantizes at a time, rounded up to whole blocks.
const GRAIN: usize = 1 << 14;

/// A map of 256 ascending values, with tables that give the code of the nearest map value in a few instructions. The
/// code of a map value is its index.
pub struct Codebook {
    values: [f32; 256],
    /// Entries for the f32 values to encode, indexed by a value's upper 16 bits. The value's code is the upper half of
    /// the sum of the entry and the value's lower 16 bits. The upper half of an entry is the code of the smallest value
    /// with this index. If the next code begins at a larger value with this index, the entry's lower half is such that
    /// the addition carries into the upper half for that value and for all larger ones. Among the values with one
    /// index, at most one code begins. The lower 16 bits of a negative value are inverted before the addition, so that
    /// they grow with the value.
    table: Box<[u32; 1 << 16]>,
    /// The map as one line (a slope and an offset) for each decade of magnitudes, within which map values are equally
    /// spaced. With the lines, the codes of optimizer states are computed in registers.
    #[cfg(target_arch = "x86_64")]
    lines: Lines,
    /// Four tables for look-ups in registers: table `i` holds byte `i` of each of the 256 values.
    #[cfg(target_arch = "x86_64")]
    planes: [[u8; 256]; 4],
}

impl Codebook {
    /// Returns the dynamic map for values in [-1, 1].
    pub fn signed() -> &'static Self {
        static CODEBOOK: LazyLock<Codebook> = LazyLock::new(|| {
            let (signed, preserve_sign) = (true, false);
            Codebook::dynamic(signed, preserve_sign)
        });
        &CODEBOOK
    }

    /// Returns the dynamic map for values in [0, 1].
    pub fn unsigned() -> &'static Self {
        static CODEBOOK: LazyLock<Codebook> = LazyLock::new(|| {
            let (signed, preserve_sign) = (false, false);
            Codebook::dynamic(signed, preserve_sign)
        });
        &CODEBOOK
    }

    /// Returns the map of [`signed`](Self::signed) for optimizer states. -0, and a negative number that would be
    /// rounded to zero, get the code of the negative value next to zero instead, which keeps the sign. A NaN (such as
    /// 0 / 0 in a block of zeros) gets the code 255.
    pub fn sign_preserving() -> &'static Self {
        static CODEBOOK: LazyLock<Codebook> = LazyLock::new(|| {
            let (signed, preserve_sign) = (true, true);
            Codebook::dynamic(signed, preserve_sign)
        });
        &CODEBOOK
    }

    /// Returns the 256 values in ascending order.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// Returns the code whose value is nearest to `x`. A tie goes to the even code, a NaN to code 0. The map
    /// [`sign_preserving`](Self::sign_preserving) differs for NaNs, -0 and negative numbers near zero.
    #[inline(always)]
    pub fn encode(&self, x: f32) -> u8 {
        encode(&self.table, x)
    }

    /// Writes the codes of `values * scale`, which are those of [`encode`](Self::encode), to `codes`. `scale` is one
    /// over the largest magnitude of `values`. The map [`signed`](Self::signed) is not supported, because
    /// implementations of [`Lanes`] keep the signs of values.
    #[inline(always)]
    pub(super) fn encode_block<L: Lanes>(
        &self,
        lanes: L,
        values: &[f32; BLOCK_SIZE],
        scale: f32,
        codes: &mut [u8; BLOCK_SIZE],
    ) {
        if scale > 0.0 && scale.is_finite() {
            lanes.encode(self, values, scale, codes);
        } else {
            self.encode_each(values, scale, codes);
        }
    }

    /// Writes the codes of `values * scale` to `codes`, one by one.
    #[inline(always)]
    pub(super) fn encode_each(&self, values: &[f32], scale: f32, codes: &mut [u8]) {
        // The loop vectorises only with a plain reference to the table.
        let table = &*self.table;
        for (code, value) in codes.iter_mut().zip(values) {
            *code = encode(table, value * scale);
        }
    }

    /// Returns the map as one line for each decade.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Returns four tables: table `i` holds byte `i` of each of the 256 values.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn planes(&self) -> &[[u8; 256]; 4] {
        &self.planes
    }

    /// Returns the value of a code.
    #[inline(always)]
    pub fn decode(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// Makes the dynamic map, with negative values if `signed`. With `preserve_sign`, encoding treats -0, negative
    /// numbers near zero and NaNs as [`sign_preserving`](Self::sign_preserving) says.
    fn dynamic(signed: bool, preserve_sign: bool) -> Self {
        let values = create_dynamic_map(signed);
        // The code of zero.
        let zero = values.partition_point(|&v| v < 0.0) as u32;
        // Entries of upper halves that only NaNs have keep this initial code: bitsandbytes' search gives 0 for a NaN,
        // and with `preserve_sign`, its correction of signs changes 0 to 255.
        let mut table = vec![if preserve_sign { 255 << 16 } else { 0 }; 1 << 16];
        let mut code = 0;
        for order in 0..1u32 << 16 {
            // Of all upper halves (16 bits) in ascending order of their values, the one at index `order`.
            let upper = if order < 0x8000 { 0xffff - order } else { order - 0x8000 };
            if f32::from_bits(upper << 16).is_nan() {
                continue;
            }
            let negative = upper >= 0x8000;
            let mut entry = code << 16;
            if code < 255 {
                let border_bits = border(&values, code as usize).to_bits();
                if border_bits >> 16 == upper {
                    // The lower half of the last value with `code`. The addition carries, so that a value gets the next
                    // code, if its lower half is larger.
                    let last = if negative { !border_bits } else { border_bits } & 0xffff;
                    entry |= 0xffff - last;
                    code += 1;
                }
            }
            // A negative number gets at most the code below that of zero. `code` is the largest code that the entry
            // gives. The lower half of the entry becomes 0, so that no addition carries into the next code.
            if preserve_sign && negative && code >= zero {
                entry = (entry >> 16).min(zero - 1) << 16;
            }
            table[upper as usize] = entry;
        }
        debug_assert_eq!(code, 255, "every border has its entry");
        let table = table.into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!("its length is fixed"));
        Self {
            #[cfg(target_arch = "x86_64")]
            // `Lines` gives each magnitude a number: its code minus the code of zero.
            lines: Lines::new(signed, |number| border(&values, zero as usize + number)),
            #[cfg(target_arch = "x86_64")]
            planes: std::array::from_fn(|byte| values.map(|value| value.to_bits().to_le_bytes()[byte])),
            values,
            table,
        }
    }
}

/// Looks up the code of `x` as the documentation of [`Codebook::table`] describes.
#[inline(always)]
fn encode(table: &[u32; 1 << 16], x: f32) -> u8 {
    let bits = x.to_bits();
    let entry = table[(bits >> 16) as usize];
    // Inverts the bits of a negative value.
    let ascending = bits ^ ((bits as i32) >> 31) as u32;
    ((entry + (ascending & 0xffff)) >> 16) as u8
}

/// Returns the largest number whose code is at most `code`. This is the middle between the values of `code` and of the
/// next code, or the f32 just below the middle if a tie goes to the next code.
fn border(values: &[f32; 256], code: usize) -> f32 {
    let middle = (values[code] + values[code + 1]) * 0.5;
    if code.is_multiple_of(2) { middle } else { middle.next_down() }
}

/// Quantizes `values` in blocks of `block_size` elements (the last block may be shorter). Writes each block's largest
/// magnitude to `absmax`, and to `codes` the codes of the block's values divided by this magnitude.
///
/// # Errors
/// [`Error::Argument`] if `block_size` is 0; [`Error::Shape`] if `codes` is not as long as `values` or `absmax` does
/// not have one entry for each block.
pub fn quantize_blockwise(
    values: &[f32],
    codebook: &Codebook,
    block_size: usize,
    codes: &mut [u8],
    absmax: &mut [f32],
) -> Result<()> {
    check_lengths("quantize_blockwise", values.len(), block_size, codes.len(), absmax.len())?;
    let mut blocks: Vec<_> =
        values.chunks(block_size).zip(codes.chunks_mut(block_size)).zip(absmax.iter_mut()).collect();
    par_chunks_mut(&mut blocks, GRAIN.div_ceil(block_size), |_, blocks| {
        for ((values, codes), absmax) in blocks {
            **absmax = values.iter().fold(0f32, |max, v| max.max(v.abs()));
            let scale = 1.0 / **absmax;
            for (code, value) in codes.iter_mut().zip(values.iter()) {
                *code = codebook.encode(value * scale);
            }
        }
    });
    Ok(())
}

/// Writes the values that `codes` and `absmax` represent to `values`. This is the inverse of [`quantize_blockwise`] up
/// to rounding.
///
/// # Errors
/// As [`quantize_blockwise`].
pub fn dequantize_blockwise(
    codes: &[u8],
    absmax: &[f32],
    codebook: &Codebook,
    block_size: usize,
    values: &mut [f32],
) -> Result<()> {
    check_lengths("dequantize_blockwise", values.len(), block_size, codes.len(), absmax.len())?;
    let mut blocks: Vec<_> = values.chunks_mut(block_size).zip(codes.chunks(block_size)).zip(absmax).collect();
    par_chunks_mut(&mut blocks, GRAIN.div_ceil(block_size), |_, blocks| {
        for ((values, codes), absmax) in blocks {
            for (value, &code) in values.iter_mut().zip(codes.iter()) {
                *value = codebook.decode(code) * **absmax;
            }
        }
    });
    Ok(())
}

/// Checks the block size and the lengths of `codes` and `absmax` for this number of values.
fn check_lengths(op: &'static str, values: usize, block_size: usize, codes: usize, absmax: usize) -> Result<()> {
    if block_size == 0 {
        return Err(Error::argument(op, "found block_size 0, expected at least 1"));
    }
    let blocks = values.div_ceil(block_size);
    if codes != values || absmax != blocks {
        return Err(Error::shape(
            op,
            format!("found {codes} codes and {absmax} scales, expected {values} and {blocks} for {values} values"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::lanes::{WithLanes, with_all_lanes};
    use super::*;

    /// Finds the code of `x` with the binary search of bitsandbytes, step by step.
    fn binary_search(map: &[f32; 256], x: f32) -> u8 {
        let (mut pivot, mut upper_pivot, mut lower_pivot) = (127usize, 255usize, 0usize);
        let mut step = 64;
        while step > 0 {
            if x > map[pivot] {
                lower_pivot = pivot;
                pivot += step;
            } else {
                upper_pivot = pivot;
                pivot -= step;
            }
            step /= 2;
        }
        let nearest = if x > map[pivot] {
            if x > (map[upper_pivot] + map[pivot]) * 0.5 { upper_pivot } else { pivot }
        } else if x < (map[lower_pivot] + map[pivot]) * 0.5 {
            lower_pivot
        } else {
            pivot
        };
        nearest as u8
    }

    /// Returns numbers to encode, without NaNs. They have every upper half of an f32, combined with lower halves at
    /// both ends and in the middle of their range. Others are at and next to the borders between two codes.
    fn probes(codebook: &Codebook) -> impl Iterator<Item = f32> {
        let grid = (0..=0xffffu32).flat_map(|upper| [0, 1, 0x7fff, 0x8000, 0xffff].map(|lower| upper << 16 | lower));
        let borders = (0..255).flat_map(|code| {
            let middle = (codebook.values[code] + codebook.values[code + 1]) * 0.5;
            [middle.next_down().next_down(), middle.next_down(), middle, middle.next_up()]
        });
        grid.map(f32::from_bits).filter(|x| !x.is_nan()).chain(borders)
    }

    #[test]
    fn encode_equals_the_binary_search_and_gives_0_for_nan() {
        for codebook in [Codebook::signed(), Codebook::unsigned()] {
            for x in probes(codebook) {
                assert_eq!(codebook.encode(x), binary_search(codebook.values(), x), "{x:e}");
            }
            assert_eq!(codebook.encode(f32::NAN), 0);
            assert_eq!(codebook.encode(-f32::NAN), 0);
        }
    }

    #[test]
    fn sign_preserving_encode_corrects_the_sign_and_gives_255_for_nan() {
        let codebook = Codebook::sign_preserving();
        for x in probes(codebook) {
            let mut expected = binary_search(codebook.values(), x);
            if codebook.decode(expected).is_sign_negative() != x.is_sign_negative() {
                expected = if x > 0.0 { expected + 1 } else { expected - 1 };
            }
            assert_eq!(codebook.encode(x), expected, "{x:e}");
        }
        assert_eq!(codebook.encode(f32::NAN), 255);
    }

    /// Compares the codes and the values that [`Lanes`] compute for a block with those of [`Codebook::encode`] and
    /// [`Codebook::values`].
    #[derive(Clone, Copy)]
    struct Compare<'a> {
        codebook: &'a Codebook,
        values: &'a [f32; BLOCK_SIZE],
        scale: f32,
    }

    impl WithLanes for Compare<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, l: L) {
            let Self { codebook, values, scale } = self;
            let mut codes = [0; BLOCK_SIZE];
            codebook.encode_block(l, values, scale, &mut codes);
            assert_eq!(codes, values.map(|x| codebook.encode(x * scale)), "{values:?} times {scale}");
            let all_codes = std::array::from_fn::<u8, BLOCK_SIZE, _>(|code| code as u8);
            for start in (0..BLOCK_SIZE).step_by(4 * L::WIDTH) {
                // `decode` takes the codes for four registers; `part` gives the values of one register.
                let decoded = l.decode(codebook, &all_codes[start..]);
                for part in 0..4 {
                    // Room for the values of a register; `WIDTH` is at most 16.
                    let mut found = [0.0; 16];
                    l.store(l.part(codebook, decoded, &all_codes[start..], part), &mut found);
                    let here = start + part * L::WIDTH;
                    assert_eq!(found[..L::WIDTH], codebook.values()[here..here + L::WIDTH]);
                }
            }
        }
    }

    #[test]
    fn encode_block_and_decode_equal_the_functions_of_single_values() {
        for (codebook, smallest) in [(Codebook::sign_preserving(), -1.0), (Codebook::unsigned(), 0.0)] {
            let probes: Vec<f32> = probes(codebook).filter(|x| (smallest..=1.0).contains(x)).collect();
            let mut values = [0f32; BLOCK_SIZE];
            for scale in [1.0, 0.75, 1e-30] {
                for part in probes.chunks(BLOCK_SIZE) {
                    values[..part.len()].copy_from_slice(part);
                    with_all_lanes(Compare { codebook, values: &values, scale });
                }
            }
            // For these scales, `encode_block` does not use `Lanes`. A block of zeros has an infinite scale.
            for scale in [f32::INFINITY, f32::NAN, 0.0] {
                values = [0.0; BLOCK_SIZE];
                (values[1], values[2]) = (-0.0, 1e-40);
                with_all_lanes(Compare { codebook, values: &values, scale });
            }
        }
    }

    #[test]
    fn maps_ascend_to_one_hold_zero_and_have_negative_values_only_if_signed() {
        for signed in [false, true] {
            let map = create_dynamic_map(signed);
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(map.contains(&0.0) && map[255] == 1.0);
            assert_eq!(map[0] < 0.0, signed);
        }
    }

    #[test]
    fn blockwise_round_trip_errors_are_at_most_half_a_gap_of_the_map() {
        let values: Vec<f32> = (0..1000).map(|i| ((i as f32) * 0.37).sin() * 10f32.powi(i / 300 - 2)).collect();
        let (mut codes, mut absmax, mut back) = (vec![0; 1000], vec![0.0; 16], vec![0.0; 1000]);
        quantize_blockwise(&values, Codebook::signed(), 64, &mut codes, &mut absmax).unwrap();
        dequantize_blockwise(&codes, &absmax, Codebook::signed(), 64, &mut back).unwrap();
        for (block, (values, back)) in values.chunks(64).zip(back.chunks(64)).enumerate() {
            for (v, b) in values.iter().zip(back) {
                // The widest gap between two values of the map is 0.9 / 64. The bound is slightly more than half of it.
                assert!((v - b).abs() <= 0.0071 * absmax[block], "{v} became {b}");
            }
        }
    }

    #[test]
    fn wrong_lengths_and_a_block_size_of_0_are_errors() {
        let error = quantize_blockwise(&[0.0; 10], Codebook::signed(), 4, &mut [0; 10], &mut [0.0; 2]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "quantize_blockwise: found 10 codes and 2 scales, expected 10 and 3 for 10 values"
        );
        assert!(quantize_blockwise(&[], Codebook::signed(), 0, &mut [], &mut []).is_err());
        assert!(dequantize_blockwise(&[0; 9], &[0.0; 3], Codebook::signed(), 4, &mut [0.0; 10]).is_err());
    }
}
