//! Changes CPU tensors in place, including views of larger buffers.
//!
//! No two elements of the changed tensor (`dst`) may have the same memory, as they do in a broadcast view. A second
//! operand (`src`) must have another storage than `dst`. Candle returns an error if one of these rules is broken.

use candle_core::{CpuStorage, DType, Layout};

use super::access::{Operand, elements, write1, write2};
use super::elem::{Elem, Stored};
use super::map::convert;
use super::pool::{GRAIN, SharedMut, par_ranges};
use super::simd::{Real, dispatch};
use super::strided::{BLOCK, Blocks, View, collapse, for_each_run};
use crate::{Error, Raw, Result, dispatch_float};

/// Computes dst += src, rounded to the dtype of `dst`.
///
/// # Errors
/// [`Error::Shape`] if `src` does not have the shape of `dst`, [`Error::DType`] if a dtype is not a floating-point one,
/// [`Error::Candle`] if both tensors have the same storage or `dst` is a broadcast view.
pub fn accumulate(dst: &Raw, src: &Raw) -> Result<()> {
    const OP: &str = "accumulate";
    check_dims(OP, dst, src)?;
    dispatch_float!(dst.dtype(), OP, D => dispatch_float!(src.dtype(), OP, S => {
        write2(OP, dst, src, |dst, layout, src| {
            update_from::<D, S>(dst, layout, src, &add_slice)
        })
    }))
}

/// Computes dst = src, rounded to the dtype of `dst`. If one of the dtypes is an integer type, the other must be the
/// same.
///
/// # Errors
/// [`Error::Shape`] and [`Error::Candle`] as [`accumulate`], [`Error::DType`] if the dtypes differ and one of them is
/// not f32, f64, f16 or bf16, or if both have the same float dtype of 8 bits or fewer.
pub fn copy_into(dst: &Raw, src: &Raw) -> Result<()> {
    const OP: &str = "copy_into";
    check_dims(OP, dst, src)?;
    match dst.dtype() {
        same if same == src.dtype() => match same {
            DType::U8 => copy_same::<u8>(OP, dst, src),
            DType::U32 => copy_same::<u32>(OP, dst, src),
            DType::I16 => copy_same::<i16>(OP, dst, src),
            DType::I32 => copy_same::<i32>(OP, dst, src),
            DType::I64 => copy_same::<i64>(OP, dst, src),
            _ => dispatch_float!(same, OP, T => copy_same::<T>(OP, dst, src)),
        },
        _ => dispatch_float!(dst.dtype(), OP, D => dispatch_float!(src.dtype(), OP, S => {
            write2(OP, dst, src, |dst, layout, src| {
                update_from::<D, S>(dst, layout, src, &convert_slice)
            })
        })),
    }
}

/// Sets every element of `dst` to `value`, rounded to the dtype of `dst`.
///
/// # Errors
/// [`Error::DType`] if the dtype is not a floating-point one, [`Error::Candle`] if `dst` is a broadcast view.
pub fn fill(dst: &Raw, value: f64) -> Result<()> {
    const OP: &str = "fill";
    dispatch_float!(dst.dtype(), OP, T => write1(OP, dst, |dst, layout| {
        update::<T>(dst, layout, &|dst, _| dst.fill(from_f64(value)))
    }))
}

/// Computes dst *= factor, rounded to the dtype of `dst`.
///
/// # Errors
/// As [`fill`].
pub fn scale_in_place(dst: &Raw, factor: f64) -> Result<()> {
    const OP: &str = "scale_in_place";
    dispatch_float!(dst.dtype(), OP, T => write1(OP, dst, |dst, layout| {
        update::<T>(dst, layout, &|dst, _| scale_slice(dst, factor))
    }))
}

/// Computes dst += weight * (src - dst), rounded to the dtype of `dst`. The weight is a tensor of one f64 instead of a
/// number, so that on a GPU replays of a CUDA graph read the weight's current value.
///
/// # Errors
/// As [`accumulate`]; [`Error::DType`] or [`Error::Shape`] if `weight` is not a tensor of one f64.
pub fn lerp_in_place(dst: &Raw, src: &Raw, weight: &Raw) -> Result<()> {
    const OP: &str = "lerp_in_place";
    check_dims(OP, dst, src)?;
    check_weight(OP, weight)?;
    let weight = weight.flatten_all()?.to_vec1::<f64>()?[0];
    dispatch_float!(dst.dtype(), OP, D => dispatch_float!(src.dtype(), OP, S => {
        write2(OP, dst, src, |dst, layout, src| {
            update_from::<D, S>(dst, layout, src, &|dst, src| lerp_slice(dst, src, weight))
        })
    }))
}

/// Checks that the weight of [`lerp_in_place`] is a tensor of one f64.
///
/// # Errors
/// [`Error::DType`] if its dtype is not f64, [`Error::Shape`] if it has not exactly one element.
pub(crate) fn check_weight(op: &'static str, weight: &Raw) -> Result<()> {
    if weight.dtype() != DType::F64 {
        return Err(Error::dtype(op, format!("found a weight of dtype {}, expected f64", weight.dtype().as_str())));
    }
    if weight.elem_count() != 1 {
        return Err(Error::shape(op, format!("found a weight of shape {:?}, expected one number", weight.dims())));
    }
    Ok(())
}

fn from_f64<T: Elem>(x: f64) -> T {
    T::from_acc(T::Acc::from_f64(x))
}

fn add_slice<D: Elem, S: Elem>(dst: &mut [D], src: &[S]) {
    dispatch(
        #[inline(always)]
        || {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = D::from_acc(d.to_acc() + D::Acc::from_f64(s.to_acc().to_f64()));
            }
        },
    );
}

fn lerp_slice<D: Elem, S: Elem>(dst: &mut [D], src: &[S], weight: f64) {
    let weight = D::Acc::from_f64(weight);
    dispatch(
        #[inline(always)]
        || {
            for (d, s) in dst.iter_mut().zip(src) {
                let (old, new) = (d.to_acc(), D::Acc::from_f64(s.to_acc().to_f64()));
                *d = D::from_acc(old + weight * (new - old));
            }
        },
    );
}

fn convert_slice<D: Elem, S: Elem>(dst: &mut [D], src: &[S]) {
    dispatch(
        #[inline(always)]
        || {
            for (d, s) in dst.iter_mut().zip(src) {
                *d = convert(*s);
            }
        },
    );
}

fn scale_slice<T: Elem>(dst: &mut [T], factor: f64) {
    let factor = T::Acc::from_f64(factor);
    dispatch(
        #[inline(always)]
        || {
            for d in dst {
                *d = T::from_acc(d.to_acc() * factor);
            }
        },
    );
}

/// Copies `src` to `dst`; both have elements of type `T`.
fn copy_same<T: Stored>(op: &'static str, dst: &Raw, src: &Raw) -> Result<()> {
    write2(op, dst, src, |dst, layout, src| update_from::<T, T>(dst, layout, src, &|dst, src| dst.copy_from_slice(src)))
}

fn check_dims(op: &'static str, dst: &Raw, src: &Raw) -> Result<()> {
    if dst.dims() == src.dims() {
        return Ok(());
    }
    Err(Error::shape(op, format!("found a source of shape {:?}, expected {:?}", src.dims(), dst.dims())))
}

/// Calls `kernel` on several threads with pieces of `dst` that are contiguous in memory, each with the elements of
/// `src` that have the same indices.
fn update_from<D: Stored, S: Stored>(
    dst: &mut CpuStorage,
    layout: &Layout,
    (src_storage, src_layout): Operand<'_>,
    kernel: &(dyn Fn(&mut [D], &[S]) + Sync),
) -> candle_core::Result<()> {
    if layout.shape().elem_count() == 0 {
        return Ok(());
    }
    let src = View::new(elements::<S>((src_storage, src_layout))?, src_layout, layout.dims());
    if let Some(src) = src.contiguous() {
        return update(dst, layout, &|dst, start| kernel(dst, &src[start..start + dst.len()]));
    }
    // `src` is not contiguous: gather up to `BLOCK` of its elements at a time.
    update(dst, layout, &|dst, start| {
        let mut blocks = Blocks::new(&src);
        let mut start = start;
        for dst in dst.chunks_mut(BLOCK) {
            let end = start + dst.len();
            kernel(dst, blocks.get(start..end));
            start = end;
        }
    })
}

/// Calls `kernel` on several threads with pieces of `dst` that are contiguous in memory, each with the row-major index
/// of its first element.
fn update<D: Stored>(
    dst: &mut CpuStorage,
    layout: &Layout,
    kernel: &(dyn Fn(&mut [D], usize) + Sync),
) -> candle_core::Result<()> {
    let axes = collapse(layout, layout.dims());
    let dst = SharedMut::new(&mut D::slice_mut(dst)?[layout.start_offset()..]);
    par_ranges(layout.shape().elem_count(), GRAIN, |range| {
        let start = range.start;
        for_each_run(&axes, range, |position, offset, stride, length| {
            // A run is `length` elements, `stride` apart in memory. The first is at index `offset` of `dst` in memory,
            // and at index `position` of the range. If there are gaps between the elements, each one is a piece.
            let (pieces, piece_length) = if stride == 1 { (1, length) } else { (length, 1) };
            for i in 0..pieces {
                let first = offset + i * stride;
                // SAFETY: candle has checked that the elements of the layout are distinct, so pieces do not overlap.
                kernel(unsafe { dst.slice(first..first + piece_length) }, start + position + i);
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::raw::from_vec;

    /// A tensor of `n` whole numbers: those from -30 to 30, repeated.
    fn sequence(n: usize, dims: &[usize], dtype: DType) -> Raw {
        let data: Vec<f64> = (0..n).map(|i| (i % 61) as f64 - 30.0).collect();
        from_vec(data, dims).to_dtype(dtype).unwrap()
    }

    fn values(x: &Raw) -> Vec<f64> {
        x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

    #[test]
    fn accumulate_adds_every_float_dtype_to_every_float_dtype() {
        for d in FLOATS {
            for s in FLOATS {
                let (dst, src) = (sequence(100, &[4, 25], d), sequence(100, &[25, 4], s).t().unwrap());
                let expected: Vec<f64> = values(&dst).iter().zip(values(&src)).map(|(d, s)| d + s).collect();
                accumulate(&dst, &src).unwrap();
                assert_eq!(values(&dst), expected, "{d:?} += {s:?}");
            }
        }
    }

    #[test]
    fn lerp_goes_part_of_the_way_in_every_float_dtype() {
        for d in FLOATS {
            let (dst, src) = (sequence(70_000, &[70_000], d), sequence(70_000, &[70_000], DType::F32));
            let halves: Vec<f64> = values(&dst).iter().map(|v| v / 2.0).collect();
            scale_in_place(&dst, 3.0).unwrap();
            lerp_in_place(&dst, &src, &Raw::new(&[0.25f64], dst.device()).unwrap()).unwrap();
            // dst = 3 v becomes 3 v + (v - 3 v) / 4 = 5 v / 2, where v are the elements of src.
            assert_eq!(values(&dst), halves.iter().map(|h| 5.0 * h).collect::<Vec<_>>(), "{d:?}");
        }
    }

    #[test]
    fn views_of_a_buffer_change_and_the_rest_of_it_stays() {
        for (dim, start, len) in [(0, 1, 2), (1, 3, 4), (2, 5, 300)] {
            let buffer = sequence(4 * 10 * 700, &[4, 10, 700], DType::F32);
            let view = buffer.narrow(dim, start, len).unwrap();
            let before = buffer.copy().unwrap();
            let src = sequence(view.elem_count(), view.dims(), DType::BF16);
            accumulate(&view, &src).unwrap();
            let mut parts = Vec::new();
            let size = buffer.dims()[dim];
            parts.push(before.narrow(dim, 0, start).unwrap());
            parts.push((before.narrow(dim, start, len).unwrap() + src.to_dtype(DType::F32).unwrap()).unwrap());
            parts.push(before.narrow(dim, start + len, size - start - len).unwrap());
            assert_eq!(values(&buffer), values(&Tensor::cat(&parts, dim).unwrap()), "dimension {dim}");
        }
    }

    #[test]
    fn transposed_views_are_copied_into_and_scaled() {
        let buffer = sequence(6, &[2, 3], DType::F64);
        copy_into(&buffer.t().unwrap(), &from_vec(vec![1f64, 2.0, 3.0, 4.0, 5.0, 6.0], &[3usize, 2][..])).unwrap();
        assert_eq!(values(&buffer), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        scale_in_place(&buffer.t().unwrap(), 0.5).unwrap();
        assert_eq!(values(&buffer), [0.5, 1.5, 2.5, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn fill_scale_and_copy_work_in_every_float_dtype() {
        for dtype in FLOATS {
            let x = sequence(70_000, &[7, 10_000], dtype);
            fill(&x.narrow(1, 10, 20).unwrap(), 1.5).unwrap();
            scale_in_place(&x, -2.0).unwrap();
            let expected: Vec<f64> = (0..70_000)
                .map(|i| if (10..30).contains(&(i % 10_000)) { -3.0 } else { -2.0 * ((i % 61) as f64 - 30.0) })
                .collect();
            assert_eq!(values(&x), expected, "{dtype:?}");
            let copy = Tensor::zeros((7, 10_000), DType::F32, &Device::Cpu).unwrap();
            copy_into(&copy, &x).unwrap();
            assert_eq!(values(&copy), expected, "{dtype:?}");
        }
    }

    #[test]
    fn integers_are_copied() {
        let (dst, src) = (from_vec(vec![1u32, 2, 3], 3), from_vec(vec![7u32, 8, 9], 3));
        copy_into(&dst, &src).unwrap();
        assert_eq!(dst.to_vec1::<u32>().unwrap(), [7, 8, 9]);
    }

    #[test]
    fn empty_tensors_are_accepted() {
        let x = sequence(0, &[0, 3], DType::F32);
        accumulate(&x, &sequence(0, &[0, 3], DType::BF16)).unwrap();
        fill(&x, 1.0).unwrap();
        assert_eq!(x.dims(), [0, 3]);
    }

    #[test]
    fn invalid_operands_are_errors() {
        let x = sequence(6, &[2, 3], DType::F32);
        let message = accumulate(&x, &sequence(3, &[3], DType::F32)).unwrap_err().to_string();
        assert_eq!(message, "accumulate: found a source of shape [3], expected [2, 3]");
        assert!(matches!(fill(&from_vec(vec![1u32], 1), 1.0), Err(Error::DType { .. })));
        assert!(accumulate(&x, &x).is_err());
        assert!(fill(&sequence(1, &[1], DType::F32).broadcast_as(4).unwrap(), 1.0).is_err());
    }
}
