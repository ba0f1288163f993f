//! Quantization to 8-bit codes with a scale per row: int8 and e4m3.

use super::{Format, Scales};
use crate::cpu::pool::par_chunks_mut;
use crate::raw::{Raw, from_vec};

/// The largest magnitude of e4m3.
const LARGEST_E4M3: f32 = 448.0;
/// The largest code of int8. -128 stays unused, so that no code times the scale is beyond the row's largest magnitude.
const LARGEST_INT8: f32 = 127.0;

/// The codes of `values` (rows, columns), and a scale for each row; `None` if a value is non-finite.
pub(super) fn quantize(values: &[f32], rows: usize, columns: usize, format: Format) -> Option<(Raw, Scales)> {
    let (mut codes, mut scales) = (vec![0u8; rows * columns], vec![1f32; rows]);
    par_chunks_mut(&mut scales, 1, |row, scale| {
        scale[0] = scale_of(&values[row * columns..(row + 1) * columns], format);
    });
    if scales.iter().any(|scale| scale.is_infinite()) {
        return None;
    }
    par_chunks_mut(&mut codes, columns, |row, codes| {
        let scale = scales[row];
        for (code, x) in codes.iter_mut().zip(&values[row * columns..]) {
            *code = match format {
                Format::Int8 => to_int8(x / scale) as u8,
                _ => to_e4m3(x / scale),
            };
        }
    });
    let scales = from_vec(scales, rows);
    let scales = if format == Format::Int8 { Scales::Int8(scales) } else { Scales::Fp8(scales) };
    Some((from_vec(codes, rows * columns), scales))
}

/// The scale of a row: infinite if a value is non-finite, 1 if all values are zero.
fn scale_of(values: &[f32], format: Format) -> f32 {
    let largest_code = if format == Format::Int8 { LARGEST_INT8 } else { LARGEST_E4M3 };
    // `max` would ignore NaN.
    let largest = values.iter().fold(0f32, |m, x| if x.is_finite() { m.max(x.abs()) } else { f32::INFINITY });
    if largest > 0.0 { largest / largest_code } else { 1.0 }
}

/// Rounds a row to the values that its codes would represent. If one value is non-finite, all become NaN.
pub(super) fn round(row: &mut [f32], format: Format) {
    let scale = scale_of(row, format);
    let scale = if scale.is_finite() { scale } else { f32::NAN };
    for x in row {
        let number = match format {
            Format::Int8 => f32::from(to_int8(*x / scale)),
            _ => from_e4m3(to_e4m3(*x / scale)),
        };
        *x = number * scale;
    }
}

/// The code nearest to a finite `x`, ties to even, at most 127 in magnitude.
fn to_int8(x: f32) -> i8 {
    round_to_even(x.clamp(-LARGEST_INT8, LARGEST_INT8)) as i8
}

/// The whole number nearest to `x`, ties to even. The magnitude of `x` must be below 2^22. `LARGE` is 1.5 · 2^23, so
/// `x + LARGE` is between 2^23 and 2^24, where an f32 has no bits for a fraction. `f32::round_ties_even` would be a
/// function call on processors without SSE 4.1.
#[inline(always)]
fn round_to_even(x: f32) -> f32 {
    const LARGE: f32 = 12_582_912.0;
    (x + LARGE) - LARGE
}

/// The e4m3 number nearest to a finite `x`, ties to even, at most 448 in magnitude.
fn to_e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs().min(LARGEST_E4M3);
    // `steps` is the magnitude in units of its last place. This unit is 2^(exponent - 3), and 2^-9 for subnormal
    // numbers.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps_in_one = f32::from_bits(((127 + 3 - exponent) as u32) << 23);
    let steps = round_to_even(magnitude * steps_in_one) as u8;
    // The code is the sum of the exponent's field and the steps, so a carry of the steps increases the exponent. The
    // steps of a normal number include its implicit bit, 8, so `field` is one less than the field of its code.
    let field = (exponent + 6) as u8;
    sign | (field * 8 + steps)
}

/// The value of an e4m3 code: a sign bit, four bits of exponent with a bias of 7, three bits of fraction. There are no
/// infinities, and the largest exponent with the largest fraction is NaN (Micikevicius et al. 2022, arXiv:2209.05433,
/// table 1).
pub(super) fn from_e4m3(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        // Subnormal: fraction / 8 · 2^-6.
        (0, _) => sign * fraction * 2f32.powi(-9),
        // (1 + fraction / 8) · 2^(exponent - 7).
        _ => sign * (8.0 + fraction) * 2f32.powi(exponent - 10),
    }
}

#[cfg(test)]
mod tests {
    use super::{from_e4m3, to_e4m3};

    #[test]
    fn e4m3_numbers_are_not_changed_by_rounding() {
        // 0x7f is NaN, with either sign.
        for code in (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(to_e4m3(from_e4m3(code)), code);
        }
    }

    #[test]
    fn to_e4m3_rounds_to_nearest_and_ties_to_even() {
        // 0x7e is the code of the largest number, 448.
        for code in 0..0x7eu8 {
            let (low, high) = (from_e4m3(code), from_e4m3(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(to_e4m3(middle), if code % 2 == 0 { code } else { code + 1 }, "{middle}");
            assert_eq!(to_e4m3(middle.next_up()), code + 1);
            assert_eq!(to_e4m3(-middle.next_down()), code | 0x80);
        }
        assert_eq!(to_e4m3(1e9), 0x7e);
    }
}
