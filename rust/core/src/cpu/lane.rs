//! [`Lane`]: SIMD registers of floating-point numbers for any instruction set.

use pulp::Simd;

/// A floating-point type with SIMD registers.
pub trait Lane: Sized + Copy {
    /// One register of the instruction set `S`.
    type Vector<S: Simd>: Copy;

    /// Returns a register with `value` in every lane.
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Vector<S>;
    /// Returns a register with the elements of `values`, followed by zeros. There must be fewer elements than lanes.
    fn load_part<S: Simd>(simd: S, values: &[Self]) -> Self::Vector<S>;
    /// Returns the sum of the lanes.
    fn sum_lanes<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;
    /// Returns `a * b`.
    fn multiply<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// Returns `a * b + c`, rounded once if the instruction set has fused multiply-adds; otherwise the product is
    /// rounded too.
    fn multiply_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
}

macro_rules! lane {
    ($t:ty, $vector:ident, $splat:ident, $load:ident, $sum:ident, $multiply:ident, $multiply_add:ident) => {
        impl Lane for $t {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$vector {
                simd.$splat(value)
            }

            #[inline(always)]
            fn load_part<S: Simd>(simd: S, values: &[Self]) -> S::$vector {
                simd.$load(values)
            }

            #[inline(always)]
            fn sum_lanes<S: Simd>(simd: S, a: S::$vector) -> Self {
                simd.$sum(a)
            }

            #[inline(always)]
            fn multiply<S: Simd>(simd: S, a: S::$vector, b: S::$vector) -> S::$vector {
                simd.$multiply(a, b)
            }

            #[inline(always)]
            fn multiply_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$multiply_add(a, b, c)
            }
        }
    };
}

lane!(f32, f32s, splat_f32s, partial_load_f32s, reduce_sum_f32s, mul_f32s, mul_add_e_f32s);
lane!(f64, f64s, splat_f64s, partial_load_f64s, reduce_sum_f64s, mul_f64s, mul_add_e_f64s);
