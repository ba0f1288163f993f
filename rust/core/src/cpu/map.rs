//! Elementwise functions of one, two and three tensors.
//!
//! Results are contiguous and have the dtype of the operands, except those of [`cast`]. The operands of one function
//! must have the same dtype, and broadcast by numpy's rules. f16 and bf16 are computed in f32: `to_acc` converts an
//! element to the type of arithmetic, `from_acc` rounds the result. A transposed operand is copied first, because
//! reading it in place would be slow. [`dispatch`] runs a loop with the best SIMD instructions of the processor.

use std::mem::MaybeUninit;

use candle_core::{CpuStorage, DType, Shape};

use super::access::{Operand, elements, read1, read2, read3};
use super::contiguous::untransposed;
use super::elem::Elem;
use super::pool::{GRAIN, par_chunks_mut};
use super::simd::{Real, dispatch};
use super::strided::{BLOCK, Blocks, Dims, View, broadcast_dims};
use crate::raw::check_allocation;
use crate::{Error, Raw, Result, dispatch_float};

/// The name of the operation in the errors of this file, except in those of [`cast`]. A caller that wants its own name
/// in errors checks its operands before it calls a function of this file.
const OP: &str = "elementwise operation";

/// A function of one number. `apply` must be `#[inline(always)]` to be vectorised.
pub trait Unary {
    /// The name of the same function in `cuda/kernels/elementwise.cu`.
    const KERNEL: &'static str;

    /// Returns the two numbers that the kernel takes in addition to the operands, such as a scalar factor. Those that
    /// the kernel does not use are 0.
    fn parameters(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// Returns the value of the function at `x`.
    fn apply<R: Real>(&self, x: R) -> R;
}

/// A function of two numbers. `apply` must be `#[inline(always)]` to be vectorised.
pub trait Binary {
    /// The name of the same function in `cuda/kernels/elementwise.cu`.
    const KERNEL: &'static str;

    /// As [`Unary::parameters`].
    fn parameters(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// Returns the value of the function at (`a`, `b`).
    fn apply<R: Real>(&self, a: R, b: R) -> R;
}

/// A function of three numbers. `apply` must be `#[inline(always)]` to be vectorised.
pub trait Ternary {
    /// The name of the same function in `cuda/kernels/elementwise.cu`.
    const KERNEL: &'static str;

    /// As [`Unary::parameters`].
    fn parameters(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// Returns the value of the function at (`a`, `b`, `c`).
    fn apply<R: Real>(&self, a: R, b: R, c: R) -> R;
}

macro_rules! binary_function {
    ($name:ident, $kernel:literal, $doc:literal, |$a:ident, $b:ident| $value:expr) => {
        #[doc = $doc]
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Binary for $name {
            const KERNEL: &'static str = $kernel;

            #[inline(always)]
            fn apply<R: Real>(&self, $a: R, $b: R) -> R {
                $value
            }
        }
    };
}

binary_function!(Add, "add", "a + b.", |a, b| a + b);
binary_function!(Sub, "sub", "a - b.", |a, b| a - b);
binary_function!(Mul, "mul", "a * b.", |a, b| a * b);
binary_function!(Div, "div", "a / b.", |a, b| a / b);
binary_function!(Maximum, "maximum", "The larger of a and b, or NaN if either is NaN.", |a, b| a.max(b));
binary_function!(Minimum, "minimum", "The smaller of a and b, or NaN if either is NaN.", |a, b| a.min(b));

/// Computes f(x) for each element.
///
/// # Errors
/// [`Error::DType`] if the dtype is not a floating-point one, [`Error::OutOfMemory`] if `x` is transposed and a copy of
/// it does not fit into memory.
pub fn unary<F: Unary + Sync>(x: &Raw, f: F) -> Result<Raw> {
    let x = &untransposed(x)?;
    dispatch_float!(x.dtype(), OP, T => read1(OP, x, |(storage, layout)| {
        map::<T, T, 1>([(storage, layout)], layout.dims(), &|[x], out| {
            let elements = out.iter_mut().zip(x);
            dispatch(
                #[inline(always)]
                || {
                    for (o, x) in elements {
                        o.write(T::from_acc(f.apply(x.to_acc())));
                    }
                },
            );
        })
    }))
}

/// Computes f(a, b) for each pair of elements of the broadcast operands.
///
/// # Errors
/// [`Error::DType`] if the dtypes differ or are not floating-point ones, [`Error::Shape`] if the shapes do not
/// broadcast, [`Error::OutOfMemory`] if the result or a copy of a transposed operand does not fit into memory.
pub fn binary<F: Binary + Sync>(a: &Raw, b: &Raw, f: F) -> Result<Raw> {
    let dims = operand_dims(&[a, b])?;
    let (a, b) = (&untransposed(a)?, &untransposed(b)?);
    dispatch_float!(a.dtype(), OP, T => read2(OP, a, b, |operands| {
        map::<T, T, 2>(operands, &dims, &|[a, b], out| {
            let elements = out.iter_mut().zip(a.iter().zip(b));
            dispatch(
                #[inline(always)]
                || {
                    for (o, (a, b)) in elements {
                        o.write(T::from_acc(f.apply(a.to_acc(), b.to_acc())));
                    }
                },
            );
        })
    }))
}

/// Computes f(a, b, c) for each triple of elements of the broadcast operands.
///
/// # Errors
/// As [`binary`].
pub fn ternary<F: Ternary + Sync>(a: &Raw, b: &Raw, c: &Raw, f: F) -> Result<Raw> {
    let dims = operand_dims(&[a, b, c])?;
    let (a, b, c) = (&untransposed(a)?, &untransposed(b)?, &untransposed(c)?);
    dispatch_float!(a.dtype(), OP, T => read3(OP, [a, b, c], |operands| {
        map::<T, T, 3>(operands, &dims, &|[a, b, c], out| {
            let elements = out.iter_mut().zip(a.iter().zip(b.iter().zip(c)));
            dispatch(
                #[inline(always)]
                || {
                    for (o, (a, (b, c))) in elements {
                        o.write(T::from_acc(f.apply(a.to_acc(), b.to_acc(), c.to_acc())));
                    }
                },
            );
        })
    }))
}

/// Converts the elements of `x` to the floating-point dtype `dtype`, rounded to nearest, ties to even. From f64 to f16
/// or bf16, elements are rounded twice: to f32, then to `dtype`. If `x` has the dtype already, the result is `x` itself
/// (contiguous or not); otherwise the result is contiguous.
///
/// # Errors
/// [`Error::DType`] if the dtypes differ and one of them is not a floating-point one, [`Error::OutOfMemory`] as
/// [`unary`].
pub fn cast(x: &Raw, dtype: DType) -> Result<Raw> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let x = &untransposed(x)?;
    dispatch_float!(x.dtype(), "cast", S => dispatch_float!(dtype, "cast", D => {
        read1("cast", x, |(storage, layout)| {
            map::<S, D, 1>([(storage, layout)], layout.dims(), &|[x], out| {
                let elements = out.iter_mut().zip(x);
                dispatch(
                    #[inline(always)]
                    || {
                        for (o, x) in elements {
                            o.write(convert::<S, D>(*x));
                        }
                    },
                );
            })
        })
    }))
}

/// Rounds `x` to the element type `D`.
#[inline(always)]
pub(super) fn convert<S: Elem, D: Elem>(x: S) -> D {
    // f64 represents every number of every element type exactly. The compiler removes a conversion to f64 and back to
    // the same type.
    D::from_acc(D::Acc::from_f64(x.to_acc().to_f64()))
}

/// Returns the shape to which the operands broadcast.
///
/// # Errors
/// [`Error::DType`] if their dtypes differ, [`Error::Shape`] if their shapes do not broadcast, [`Error::OutOfMemory`]
/// if a tensor of the shape does not fit into memory.
pub(crate) fn operand_dims(operands: &[&Raw]) -> Result<Dims> {
    let Some((first, others)) = operands.split_first() else { return Ok(Dims::new()) };
    others.iter().try_fold(Dims::from_slice(first.dims()), |dims, other| {
        check_dtypes(first, other)?;
        common_dims(&dims, other.dims(), first.dtype())
    })
}

fn check_dtypes(a: &Raw, b: &Raw) -> Result<()> {
    if a.dtype() == b.dtype() {
        return Ok(());
    }
    let (a, b) = (a.dtype().as_str(), b.dtype().as_str());
    Err(Error::dtype(OP, format!("found dtypes {a} and {b}, expected the same; convert one with to()")))
}

/// Returns the shape to which `a` and `b` broadcast, after a check that a tensor of this shape fits into memory.
/// Operands of equal shape are not checked, like the operand of [`unary`]: they usually are in memory in this shape.
fn common_dims(a: &[usize], b: &[usize], dtype: DType) -> Result<Dims> {
    if a == b {
        return Ok(Dims::from_slice(a));
    }
    let dims = broadcast_dims(a, b)
        .ok_or_else(|| Error::shape(OP, format!("shapes {a:?} and {b:?} do not broadcast together")))?;
    check_allocation(OP, &dims, dtype)?;
    Ok(dims)
}

/// A function that reads `K` slices, one of each operand, and writes every element of the slice of results. All slices
/// have the same length.
type Kernel<'f, S, D, const K: usize> = &'f (dyn Fn([&[S]; K], &mut [MaybeUninit<D>]) + Sync);

/// Creates a storage of shape `dims` whose elements `kernel` computes. It is called on several threads.
fn map<S: Elem, D: Elem, const K: usize>(
    operands: [Operand<'_>; K],
    dims: &[usize],
    kernel: Kernel<'_, S, D, K>,
) -> candle_core::Result<(CpuStorage, Shape)> {
    let len = dims.iter().product();
    let mut result = Vec::<D>::with_capacity(len);
    if len > 0 {
        let mut views = [const { None }; K];
        for (view, operand) in views.iter_mut().zip(operands) {
            let (_, layout) = operand;
            *view = Some(View::new(elements::<S>(operand)?, layout, dims));
        }
        let views = views.map(|view| view.expect("each view is made above"));
        map_views(&views, &mut result.spare_capacity_mut()[..len], kernel);
        // SAFETY: the kernel has written every element.
        unsafe { result.set_len(len) };
    }
    Ok((D::to_cpu_storage_owned(result), Shape::from(dims)))
}

/// Calls `kernel` on several threads with pieces of `out` and the elements of the views that have the same indices. A
/// thread takes pieces of `GRAIN` elements (the last one may be shorter).
fn map_views<S: Elem, D: Elem, const K: usize>(
    views: &[View<'_, S>; K],
    out: &mut [MaybeUninit<D>],
    kernel: Kernel<'_, S, D, K>,
) {
    let slices = views.each_ref().map(View::contiguous);
    if slices.iter().all(Option::is_some) {
        let slices = slices.map(Option::unwrap_or_default);
        par_chunks_mut(out, GRAIN, |index, out| {
            let start = index * GRAIN;
            kernel(slices.map(|x| &x[start..start + out.len()]), out);
        });
        return;
    }
    // Blocks of the views that are not contiguous are gathered into buffers first.
    par_chunks_mut(out, GRAIN, |index, out| {
        let mut blocks = views.each_ref().map(Blocks::new);
        let mut start = index * GRAIN;
        for out in out.chunks_mut(BLOCK) {
            let end = start + out.len();
            kernel(blocks.each_mut().map(|x| x.get(start..end)), out);
            start = end;
        }
    });
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use half::bf16;

    use super::super::pool::tests::with_1_and_n_threads;
    use super::*;
    use crate::raw::from_vec;

    struct Square;

    impl Unary for Square {
        const KERNEL: &'static str = "sqr";

        #[inline(always)]
        fn apply<R: Real>(&self, x: R) -> R {
            x * x
        }
    }

    struct MulAdd;

    impl Ternary for MulAdd {
        // There is no such kernel; the function runs only on the CPU.
        const KERNEL: &'static str = "";

        #[inline(always)]
        fn apply<R: Real>(&self, a: R, b: R, c: R) -> R {
            a * b + c
        }
    }

    const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

    /// A tensor of small whole numbers, with which arithmetic is exact in every dtype.
    fn whole_numbers(dims: &[usize], dtype: DType) -> Raw {
        let n: usize = dims.iter().product();
        let data: Vec<f64> = (0..n).map(|i| ((i * 7) % 11) as f64 - 5.0).collect();
        from_vec(data, dims).to_dtype(dtype).unwrap()
    }

    fn values(x: &Raw) -> Vec<f64> {
        x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn unary_works_on_strided_large_broadcast_and_empty_tensors() {
        for dtype in FLOATS {
            for x in [
                whole_numbers(&[], dtype),
                whole_numbers(&[3, 5], dtype).t().unwrap(),
                whole_numbers(&[9, 70, 80], dtype).narrow(1, 3, 60).unwrap(),
                whole_numbers(&[300, 301], dtype).t().unwrap(),
                whole_numbers(&[5, 1], dtype).broadcast_as((7, 5, 4)).unwrap(),
                whole_numbers(&[0, 3], dtype),
            ] {
                let y = unary(&x, Square).unwrap();
                let expected: Vec<f64> = values(&x).iter().map(|x| x * x).collect();
                assert_eq!((y.dims(), y.dtype(), y.is_contiguous()), (x.dims(), dtype, true));
                assert_eq!(values(&y), expected);
            }
        }
    }

    #[test]
    fn binary_broadcasts_like_candle() {
        let shapes: [(&[usize], &[usize]); 9] = [
            (&[4, 5], &[4, 5]),
            (&[400, 300], &[300]),
            (&[400, 300], &[400, 1]),
            (&[], &[40, 50]),
            (&[3, 1, 5, 1], &[4, 1, 6]),
            (&[1], &[]),
            (&[2, 0, 3], &[3]),
            (&[7, 1, 2000], &[6, 1]),
            (&[1, 2000], &[2000, 1]),
        ];
        for dtype in FLOATS {
            for (a, b) in shapes {
                let (a, b) = (whole_numbers(a, dtype), whole_numbers(b, dtype));
                let expected =
                    (a.to_dtype(DType::F64).unwrap()).broadcast_sub(&b.to_dtype(DType::F64).unwrap()).unwrap();
                let result = binary(&a, &b, Sub).unwrap();
                assert_eq!((result.dims(), result.dtype()), (expected.dims(), dtype));
                assert_eq!(values(&result), values(&expected), "{:?} {:?} {dtype:?}", a.dims(), b.dims());
            }
        }
    }

    #[test]
    fn two_views_of_one_storage_are_multiplied() {
        let x = whole_numbers(&[300, 200], DType::F32);
        let (a, b) = (x.narrow(1, 0, 100).unwrap(), x.narrow(1, 100, 100).unwrap());
        let expected = values(&a).iter().zip(values(&b)).map(|(a, b)| a * b).collect::<Vec<_>>();
        assert_eq!(values(&binary(&a, &b, Mul).unwrap()), expected);
    }

    #[test]
    fn ternary_broadcasts() {
        for dtype in FLOATS {
            let (a, b, c) =
                (whole_numbers(&[300, 1], dtype), whole_numbers(&[200], dtype), whole_numbers(&[2, 1, 1], dtype));
            let wide = |x: &Raw| x.to_dtype(DType::F64).unwrap().broadcast_as((2, 300, 200)).unwrap();
            let expected = ((wide(&a) * wide(&b)).unwrap() + wide(&c)).unwrap();
            assert_eq!(values(&ternary(&a, &b, &c, MulAdd).unwrap()), values(&expected));
        }
    }

    #[test]
    fn f16_and_bf16_are_computed_in_f32_and_rounded_at_the_end() {
        // 1.0078125^2 = 1.0156860..., between the bf16 numbers 1.015625 and 1.0234375.
        let x = from_vec(vec![bf16::from_f32_const(1.007_812_5)], 1);
        assert_eq!(values(&unary(&x, Square).unwrap()), [1.015_625]);
        // 300^2 overflows f16 as a result, but not as an intermediate value.
        let x = from_vec(vec![half::f16::from_f32_const(300.0)], 1);
        let one = from_vec(vec![half::f16::from_f32_const(1.0)], 1);
        assert_eq!(values(&unary(&x, Square).unwrap()), [f64::INFINITY]);
        /// Equals a, although a * a overflows f16. The terms + b - b cancel: b only makes the function a binary one.
        struct SquareOverItself;
        impl Binary for SquareOverItself {
            const KERNEL: &'static str = "";

            #[inline(always)]
            fn apply<R: Real>(&self, a: R, b: R) -> R {
                a * a / (a + b - b)
            }
        }
        assert_eq!(values(&binary(&x, &one, SquareOverItself).unwrap()), [300.0]);
    }

    #[test]
    fn casts_between_float_dtypes_are_those_of_candle_through_f32() {
        let x = from_vec(vec![0.1f64, -2.5, 65_519.9, 1e-7, f64::INFINITY, 3.0], &[2usize, 3][..]);
        for from in FLOATS {
            let x = x.to_dtype(from).unwrap().t().unwrap();
            for to in FLOATS {
                let y = cast(&x, to).unwrap();
                assert_eq!((y.dtype(), y.dims()), (to, x.dims()));
                let through = if from == to { to } else { DType::F32 };
                let expected = x.to_dtype(through).unwrap().to_dtype(to).unwrap();
                assert_eq!(values(&y), values(&expected), "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn casts_to_integers_are_errors() {
        assert!(matches!(cast(&whole_numbers(&[3], DType::F64), DType::U8), Err(Error::DType { .. })));
    }

    #[test]
    fn quotients_do_not_depend_on_the_number_of_threads() {
        let (a, b) = (whole_numbers(&[700, 301], DType::F32), whole_numbers(&[301], DType::F32));
        let (one, many) = with_1_and_n_threads(3, || values(&binary(&a, &b, Div).unwrap()));
        assert_eq!(
            one.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            many.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn wrong_shapes_and_dtypes_are_errors() {
        let (a, b) = (whole_numbers(&[2, 3], DType::F32), whole_numbers(&[2], DType::F32));
        assert!(matches!(binary(&a, &b, Add), Err(Error::Shape { .. })));
        assert!(matches!(binary(&a, &whole_numbers(&[3], DType::BF16), Add), Err(Error::DType { .. })));
        let integers = Raw::zeros(3, DType::U32, &Device::Cpu).unwrap();
        assert!(matches!(unary(&integers, Square), Err(Error::DType { .. })));
    }

    #[test]
    fn results_that_do_not_fit_into_memory_are_errors() {
        let huge = |dims: &[usize]| whole_numbers(&[1], DType::F32).broadcast_as(dims).unwrap();
        let result = binary(&huge(&[1 << 40, 1]), &huge(&[1 << 40]), Add);
        assert!(matches!(result, Err(Error::OutOfMemory { .. })));
    }
}
