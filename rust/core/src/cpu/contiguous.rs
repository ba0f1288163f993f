//! Contiguous copies of strided tensors.

use std::borrow::Cow;
use std::mem::MaybeUninit;

use candle_core::{DType, Layout, Shape, WithDType};

use super::access::{elements, read1};
use super::pool::{GRAIN, SharedMut, par_chunks_mut, par_ranges};
use super::strided::{Axis, View, collapse};
use crate::raw::check_allocation;
use crate::{Raw, Result};

/// A transposed tensor is copied in tiles of this many rows and columns of the result. The copy reads each column of
/// a tile as 16 adjacent elements of the source (32 to 128 bytes), and writes each row of the tile as 64 adjacent
/// elements of the result (128 to 512 bytes).
const TILE_ROWS: usize = 16;
const TILE_COLUMNS: usize = 64;

/// The tensor itself if it is contiguous, a contiguous copy otherwise; any dtype.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the copy does not fit into memory. The copy of a broadcast view
/// can be far larger than the memory of the view.
pub fn contiguous(x: &Raw) -> Result<Raw> {
    if x.is_contiguous() {
        return Ok(x.clone());
    }
    check_allocation("contiguous", x.dims(), x.dtype())?;
    match x.dtype() {
        DType::F32 => copy::<f32>(x),
        DType::F64 => copy::<f64>(x),
        DType::BF16 => copy::<half::bf16>(x),
        DType::F16 => copy::<half::f16>(x),
        _ => Ok(x.contiguous()?),
    }
}

/// A contiguous copy of `x` if `x` is transposed (an axis other than the innermost one has stride 1, and the innermost
/// one a larger stride) and no axis is broadcast; `x` itself otherwise. Reading a transposed tensor along its innermost
/// axis would fetch a cache line for each element.
pub(super) fn untransposed(x: &Raw) -> Result<Cow<'_, Raw>> {
    if x.is_contiguous() {
        return Ok(Cow::Borrowed(x));
    }
    let axes = collapse(x.layout(), x.dims());
    let transposed = transposed_axis(&axes).is_some() && axes.iter().all(|a| a.stride > 0);
    Ok(if transposed { Cow::Owned(contiguous(x)?) } else { Cow::Borrowed(x) })
}

/// The index of the axis with stride 1, if there is one and the stride of the innermost axis is larger than 1.
fn transposed_axis(axes: &[Axis]) -> Option<usize> {
    let (inner, outer) = axes.split_last()?;
    if inner.stride > 1 { outer.iter().position(|a| a.stride == 1) } else { None }
}

fn copy<T: WithDType>(x: &Raw) -> Result<Raw> {
    read1("contiguous", x, |(storage, layout)| {
        let len = layout.shape().elem_count();
        let mut result = Vec::<T>::with_capacity(len);
        if len > 0 {
            copy_elements(elements::<T>((storage, layout))?, layout, &mut result.spare_capacity_mut()[..len]);
            // SAFETY: every element has been written.
            unsafe { result.set_len(len) };
        }
        Ok((T::to_cpu_storage_owned(result), Shape::from(layout.dims())))
    })
}

fn copy_elements<T: WithDType>(x: &[T], layout: &Layout, out: &mut [MaybeUninit<T>]) {
    let axes = collapse(layout, layout.dims());
    if let Some(row_axis) = transposed_axis(&axes) {
        return copy_transposed(x, &axes, row_axis, out);
    }
    let view = View::new(x, layout, layout.dims());
    par_chunks_mut(out, GRAIN, |index, out| {
        let start = index * GRAIN;
        view.gather(start..start + out.len(), out, MaybeUninit::new);
    });
}

/// Copies a tensor whose axis `row_axis` has stride 1, and whose last axis has a larger stride. In the result, the axis
/// `row_axis` indexes the rows of matrices and the last axis their columns; all further axes count the matrices.
fn copy_transposed<T: WithDType>(x: &[T], axes: &[Axis], row_axis: usize, out: &mut [MaybeUninit<T>]) {
    // The axis of the columns, and the number of rows.
    let columns = *axes.last().expect("a transposed tensor has axes");
    let rows = axes[row_axis].size;
    // The distance in the result between neighbouring rows of a matrix.
    let row_stride: usize = axes[row_axis + 1..].iter().map(|a| a.size).product();
    let bands = rows.div_ceil(TILE_ROWS);
    let matrices = out.len() / (rows * columns.size);
    // A thread takes this many bands at a time: at least `GRAIN` elements.
    let grain = GRAIN.div_ceil(TILE_ROWS * columns.size);
    let out = SharedMut::new(out);
    par_ranges(matrices * bands, grain, |tasks| {
        for task in tasks {
            // A task copies a band: at most `TILE_ROWS` rows of one matrix.
            let (mut matrix, first_row) = (task / bands, task % bands * TILE_ROWS);
            let height = TILE_ROWS.min(rows - first_row);
            // The start of the band in the source, where `row_axis` has stride 1, and in the result.
            let (mut from, mut to) = (first_row, first_row * row_stride);
            // The distance in the result between neighbouring indices of `axis`: the product of the sizes of the axes
            // after it, because the result is contiguous.
            let mut result_stride = columns.size;
            for (i, axis) in axes.iter().enumerate().rev().skip(1) {
                if i != row_axis {
                    let index = matrix % axis.size;
                    matrix /= axis.size;
                    from += index * axis.stride;
                    to += index * result_stride;
                }
                result_stride *= axis.size;
            }
            for column in (0..columns.size).step_by(TILE_COLUMNS) {
                let width = TILE_COLUMNS.min(columns.size - column);
                let mut tile = [[MaybeUninit::<T>::uninit(); TILE_COLUMNS]; TILE_ROWS];
                for c in 0..width {
                    let x = &x[from + (column + c) * columns.stride..][..height];
                    for (row, x) in tile.iter_mut().zip(x) {
                        row[c].write(*x);
                    }
                }
                for (r, row) in tile[..height].iter().enumerate() {
                    let at = to + r * row_stride + column;
                    // SAFETY: no two tasks share a row of the same matrix, so their slices of `out` are disjoint.
                    unsafe { out.slice(at..at + width) }.copy_from_slice(&row[..width]);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::from_vec;

    #[test]
    fn copies_equal_those_of_candle_for_many_orders_of_dimensions() {
        // Sizes that are multiples of the sides of a tile, or not; sizes of 1 and 0.
        for dims in [[3, 70, 5, 130], [1, 17, 16, 65], [40, 3, 200, 2], [2, 0, 3, 4]] {
            let n: usize = dims.iter().product();
            let x = from_vec((0..n as u32).map(|i| i as f32).collect(), &dims[..]);
            // Two swaps, of a with b and of b with c, make 15 of the 24 orders. c = 3 would add no further order.
            for a in 0..4 {
                for b in 0..4 {
                    for c in 0..3 {
                        let x = x.transpose(a, b).unwrap().transpose(b, c).unwrap();
                        // Half of the outermost dimension, so that the strides leave gaps.
                        let x = x.narrow(0, 0, x.dims()[0].div_ceil(2)).unwrap();
                        // A dense copy in f64 with two dimensions swapped, and the view itself.
                        for x in [x.to_dtype(DType::F64).unwrap().transpose(a, c).unwrap(), x] {
                            let copy = contiguous(&x).unwrap();
                            let expected = x.contiguous().unwrap().flatten_all().unwrap();
                            assert!(copy.is_contiguous() && copy.dims() == x.dims());
                            let same = copy.flatten_all().unwrap().eq(&expected).unwrap();
                            let same = same.to_vec1::<u8>().unwrap();
                            assert!(same.iter().all(|&s| s == 1), "{:?} {:?}", x.dims(), x.stride());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn broadcast_tensors_and_integers_are_copied() {
        let x = from_vec(vec![1f32, 2.0], 2).broadcast_as((3, 2)).unwrap().t().unwrap();
        assert_eq!(contiguous(&x).unwrap().to_vec2::<f32>().unwrap(), [[1.0; 3], [2.0; 3]]);
        let x = from_vec(vec![1u32, 2, 3, 4], &[2usize, 2][..]).t().unwrap();
        assert_eq!(contiguous(&x).unwrap().to_vec2::<u32>().unwrap(), [[1, 3], [2, 4]]);
    }
}
