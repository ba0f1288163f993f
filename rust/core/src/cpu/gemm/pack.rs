//! Packing: copies a block of an operand into panels in the order the tiles read it, as numbers of the accumulator.

use super::kernel::TileShape;
use crate::cpu::{Elem, Real, dispatch};

/// One operand as the tiles see it: `outer` is the stride along the rows or columns of the result, `inner` along `k`.
#[derive(Clone, Copy)]
pub struct Side<T> {
    /// The first element.
    pub ptr: *const T,
    /// Stride along the result.
    pub outer: usize,
    /// Stride along `k`.
    pub inner: usize,
}

impl<T> Side<T> {
    /// The operand from row or column `i` and position `p` of `k` on.
    ///
    /// # Safety
    /// Both are within the operand.
    pub unsafe fn at(self, i: usize, p: usize) -> Self {
        // SAFETY: within the operand.
        Self { ptr: unsafe { self.ptr.add(i * self.outer + p * self.inner) }, ..self }
    }
}

/// Which tile dimension an operand lies along.
#[derive(Clone, Copy)]
pub enum Along {
    /// Vectors.
    Rows,
    /// Broadcast elements.
    Columns,
}

/// Elements that [`pack`] writes for `len` rows or columns and `k` steps.
pub fn packed_len(shape: TileShape, along: Along, len: usize, k: usize) -> usize {
    match along {
        Along::Rows => len.next_multiple_of(shape.lanes) * k,
        Along::Columns => len.next_multiple_of(4) * k,
    }
}

/// Elements along `k` that are transposed at a time.
const RUN: usize = 16;

/// Elements of contiguous rows that are copied at a time: reading in runs lets the processor fetch ahead.
const GROUP: usize = 256;

/// Packs `len × k` elements: panels of as many rows or columns as a tile has, each panel in the order of `k`. Rows
/// that fill up the last panel are zeros.
///
/// # Safety
/// `src` is readable for `len × k` elements, `dst` writable for [`packed_len`] elements.
pub unsafe fn pack<T: Elem>(dst: *mut T::Acc, shape: TileShape, along: Along, src: Side<T>, len: usize, k: usize) {
    let (full, multiple) = match along {
        Along::Rows => (shape.rows, shape.lanes),
        Along::Columns => (shape.columns, 4),
    };
    let last = len / full * full;
    let width = (len - last).next_multiple_of(multiple);
    let group = full * (GROUP / full).max(1);
    dispatch(
        #[inline(always)]
        || {
            // SAFETY: each panel is packed from its rows or columns of the operand.
            unsafe {
                if src.outer == 1 {
                    for start in (0..last).step_by(group) {
                        for p in 0..k {
                            for i in (start..last.min(start + group)).step_by(full) {
                                copy(dst.add(i * k + p * full), src.at(i, p).ptr, full, full);
                            }
                        }
                    }
                    for p in 0..k {
                        copy(dst.add(last * k + p * width), src.at(last, p).ptr, len - last, width);
                    }
                } else {
                    for i in (0..last).step_by(full) {
                        transpose(dst.add(i * k), src.at(i, 0), full, full, k);
                    }
                    transpose(dst.add(last * k), src.at(last, 0), len - last, width, k);
                }
            }
        },
    );
}

/// Copies `len` elements and fills up to `width` with zeros.
#[inline(always)]
unsafe fn copy<T: Elem>(dst: *mut T::Acc, src: *const T, len: usize, width: usize) {
    // SAFETY: the caller gives `len` readable and `width` writable elements.
    unsafe {
        let i = copy_runs::<T, 16>(dst, src, 0, len);
        let i = copy_runs::<T, 4>(dst, src, i, len);
        let i = copy_runs::<T, 1>(dst, src, i, len);
        for i in i..width {
            *dst.add(i) = T::Acc::ZERO;
        }
    }
}

/// Copies elements `i..len` in runs of `N`, a length that makes them a few vector instructions, and returns where it
/// stopped.
#[inline(always)]
unsafe fn copy_runs<T: Elem, const N: usize>(dst: *mut T::Acc, src: *const T, mut i: usize, len: usize) -> usize {
    while i + N <= len {
        // SAFETY: below `len`.
        unsafe {
            let from = src.add(i).cast::<[T; N]>().read_unaligned();
            let mut to = [T::Acc::ZERO; N];
            for (x, y) in to.iter_mut().zip(from) {
                *x = y.to_acc();
            }
            dst.add(i).cast::<[T::Acc; N]>().write_unaligned(to);
        }
        i += N;
    }
    i
}

/// Packs one panel of an operand that is not contiguous along the panel.
#[inline(always)]
unsafe fn transpose<T: Elem>(dst: *mut T::Acc, src: Side<T>, len: usize, width: usize, k: usize) {
    // SAFETY: the caller gives `len × k` readable and `width × k` writable elements; rows from `len` on are not read.
    unsafe {
        let runs = if src.inner == 1 { k / RUN * RUN } else { 0 };
        for p in (0..runs).step_by(RUN) {
            for i in (0..width).step_by(4) {
                let mut rows = [[T::Acc::ZERO; RUN]; 4];
                for (r, row) in rows.iter_mut().enumerate().take(len.saturating_sub(i)) {
                    let from = src.at(i + r, p).ptr;
                    for (q, x) in row.iter_mut().enumerate() {
                        *x = (*from.add(q)).to_acc();
                    }
                }
                store_columns(&rows, dst.add(p * width + i), width);
            }
        }
        for p in runs..k {
            for i in 0..width {
                *dst.add(p * width + i) = if i < len { (*src.at(i, p).ptr).to_acc() } else { T::Acc::ZERO };
            }
        }
    }
}

/// Writes each of the columns as four neighbours, one column `width` elements after the other.
#[inline(always)]
unsafe fn store_columns<T: Real>(rows: &[[T; RUN]; 4], dst: *mut T, width: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::any::TypeId::of::<T>() == std::any::TypeId::of::<f32>() {
        use std::arch::x86_64::{_MM_TRANSPOSE4_PS, _mm_loadu_ps, _mm_storeu_ps};
        let (from, to) = (rows.as_ptr().cast::<f32>(), dst.cast::<f32>());
        for q in (0..RUN).step_by(4) {
            // SAFETY: SSE is part of x86-64; `T` is f32; the loads stay in `rows`, the stores in the caller's panel.
            unsafe {
                let (mut r0, mut r1) = (_mm_loadu_ps(from.add(q)), _mm_loadu_ps(from.add(RUN + q)));
                let (mut r2, mut r3) = (_mm_loadu_ps(from.add(2 * RUN + q)), _mm_loadu_ps(from.add(3 * RUN + q)));
                _MM_TRANSPOSE4_PS(&mut r0, &mut r1, &mut r2, &mut r3);
                _mm_storeu_ps(to.add(q * width), r0);
                _mm_storeu_ps(to.add((q + 1) * width), r1);
                _mm_storeu_ps(to.add((q + 2) * width), r2);
                _mm_storeu_ps(to.add((q + 3) * width), r3);
            }
        }
        return;
    }
    for q in 0..RUN {
        for (r, row) in rows.iter().enumerate() {
            // SAFETY: within the caller's panel.
            unsafe { *dst.add(q * width + r) = row[q] };
        }
    }
}
