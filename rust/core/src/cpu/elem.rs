//! Element types: the types in which numbers are stored, and the types of the arithmetic on them.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, WithDType};
use half::{bf16, f16};

use super::simd::Real;

/// A type of tensor elements whose storage can be changed in place.
pub trait Stored: WithDType {
    /// The elements of a storage.
    ///
    /// # Errors
    /// If the storage holds another dtype.
    fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]>;
}

/// A floating-point type of tensor elements. f16 and bf16 only store values: kernels convert them to f32 and compute
/// in f32.
pub trait Elem: Stored {
    /// The type that arithmetic and accumulation use.
    type Acc: Real;

    /// The value of the element, without rounding.
    fn to_acc(self) -> Self::Acc;

    /// `x` rounded to the nearest value of this type, ties to even.
    fn from_acc(x: Self::Acc) -> Self;
}

macro_rules! stored {
    ($($t:ty, $variant:ident;)*) => {$(
        impl Stored for $t {
            fn slice_mut(storage: &mut CpuStorage) -> candle_core::Result<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(data) => Ok(data),
                    other => Err(candle_core::Error::UnexpectedDType {
                        msg: "in-place operation",
                        expected: DType::$variant,
                        got: other.dtype(),
                    }),
                }
            }
        }
    )*};
}

stored! { u8, U8; u32, U32; i16, I16; i32, I32; i64, I64; bf16, BF16; f16, F16; f32, F32; f64, F64; }

macro_rules! elem {
    ($t:ty, $acc:ty, $to:expr, $from:expr) => {
        impl Elem for $t {
            type Acc = $acc;

            #[inline(always)]
            fn to_acc(self) -> $acc {
                $to(self)
            }

            #[inline(always)]
            fn from_acc(x: $acc) -> Self {
                $from(x)
            }
        }
    };
}

elem!(f32, f32, std::convert::identity, std::convert::identity);
elem!(f64, f64, std::convert::identity, std::convert::identity);
elem!(bf16, f32, bf16_to_f32, f32_to_bf16);
elem!(f16, f32, f16_to_f32, f32_to_f16);

// The `half` crate's conversions choose an instruction set in every call, so a loop over them does not vectorise. The
// conversions below do.

#[inline(always)]
fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn f32_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    // Round the low 16 bits away, ties to even.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN keeps its upper bits and becomes quiet; rounding it could carry into the exponent or the sign.
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
}

#[inline(always)]
fn f16_to_f32(x: f16) -> f32 {
    /// The difference between the exponent biases of f32 and f16, shifted to the exponent field of f32.
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(x.to_bits());
    let sign = (bits & 0x8000) << 16;
    let magnitude = bits & 0x7fff;
    let normal = (magnitude << 13) + BIAS;
    // Infinity and NaN have the largest exponent in both formats: the exponent field is 31 in f16 and
    // 31 + 2 * (127 - 15) = 255 in f32.
    let special = normal.wrapping_add(BIAS);
    // The value of a subnormal f16 is magnitude * 2^-24. An f32 with the exponent of 2^-14 and the fraction bits
    // magnitude << 13 is 2^-14 + magnitude * 2^-24: subtract 2^-14.
    let least_normal = BIAS + (1 << 23);
    let subnormal = (f32::from_bits((magnitude << 13) + least_normal) - f32::from_bits(least_normal)).to_bits();
    // 0x0400 is the least normal f16, and 0x7c00 is infinity; NaNs are above it.
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

#[inline(always)]
fn f32_to_f16(x: f32) -> f16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Normal f16: change the exponent's bias from 127 to 15, then round the low 13 bits away, ties to even. A carry out
    // of the fraction increments the exponent; the result can become infinity.
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal f16: neighbouring f32 numbers from 0.5 to 1 differ by 2^-24, so adding 0.5 rounds to a multiple of
    // 2^-24; the sum's bits less those of 0.5 are the multiplier.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    // The least normal f16 is 2^-14.
    let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    // A quiet NaN for NaN, infinity for all others.
    let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    // f32 magnitudes of 2^16 or more become infinity or NaN.
    let result = if magnitude >= (127 + 16) << 23 { special } else { finite };
    f16::from_bits((sign | result) as u16)
}

/// Evaluates an expression with `$t` standing for the element type of a dtype; returns [`Error::DType`] from the
/// enclosing function if the dtype is none of f32, f64, f16 and bf16.
///
/// [`Error::DType`]: crate::Error::DType
#[macro_export]
macro_rules! dispatch_float {
    ($dtype:expr, $op:expr, $t:ident => $body:expr) => {
        match $dtype {
            ::candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            ::candle_core::DType::F64 => {
                type $t = f64;
                $body
            }
            ::candle_core::DType::BF16 => {
                type $t = ::half::bf16;
                $body
            }
            ::candle_core::DType::F16 => {
                type $t = ::half::f16;
                $body
            }
            other => return Err($crate::cpu::elem::unsupported_dtype($op, other)),
        }
    };
}

/// The error of the operation `op`, which takes floating-point tensors only, for a tensor of the dtype `found`.
#[cold]
pub fn unsupported_dtype(op: &'static str, found: DType) -> crate::Error {
    let message = format!("found dtype {}, expected f32, f64, f16 or bf16; convert with to()", found.as_str());
    crate::Error::dtype(op, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16_converts_to_f32_exactly() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(h.to_acc() == h.to_f32() || h.to_f32().is_nan() && h.to_acc().is_nan(), "f16 {bits:#x}");
            assert!(b.to_acc() == b.to_f32() || b.to_f32().is_nan() && b.to_acc().is_nan(), "bf16 {bits:#x}");
            assert_eq!(h.to_acc().is_sign_negative(), bits >> 15 == 1);
        }
    }

    #[test]
    fn f32_rounds_to_f16_and_bf16_as_in_the_half_crate() {
        // A tie is an f32 halfway between two neighbouring f16 or bf16 numbers. The bits of ties, as an integer, are
        // multiples of 2^12 for f16 and of 2^15 for bf16, so steps of 2^9 visit every tie. Steps of an
        // odd number also visit values with other lower bits.
        for x in (0..=u32::MAX).step_by(1 << 9).chain((0..=u32::MAX).step_by(10_007)).map(f32::from_bits) {
            let (h, b) = (f16::from_acc(x), bf16::from_acc(x));
            if x.is_nan() {
                assert!(h.is_nan() && b.is_nan());
            } else {
                assert_eq!(h.to_bits(), f16::from_f32_const(x).to_bits(), "f16 of {x:e}");
                assert_eq!(b.to_bits(), bf16::from_f32_const(x).to_bits(), "bf16 of {x:e}");
            }
        }
    }

    #[test]
    fn only_dtypes_that_are_not_floating_point_are_errors() {
        fn size(dtype: DType) -> crate::Result<usize> {
            Ok(dispatch_float!(dtype, "size", T => size_of::<T>()))
        }
        for (dtype, bytes) in [(DType::F32, 4), (DType::F64, 8), (DType::F16, 2), (DType::BF16, 2)] {
            assert_eq!(size(dtype).unwrap(), bytes);
        }
        let message = size(DType::U32).unwrap_err().to_string();
        assert!(message.starts_with("size: found dtype u32"), "{message}");
    }
}
