//! Packing: copies a block of an operand into panels, in the order in which tiles read the elements and in the
//! accumulator's type. In the functions of this file, a row is a row of the operand `a` or a column of the operand `b`.

use std::any::TypeId;

use super::kernel::{LINE, TileShape, prefetch};
use crate::cpu::{Elem, Real, dispatch};

/// One operand of a product as a strided matrix; strides are in elements.
#[derive(Clone, Copy)]
pub struct Side<T> {
    /// The first element.
    pub ptr: *const T,
    /// Distance between neighbouring rows (of `a`) or columns (of `b`).
    pub outer: usize,
    /// Distance between neighbouring indices along `k`.
    pub inner: usize,
}

impl<T> Side<T> {
    /// The operand without its first `i` rows (of `a`) or columns (of `b`) and without its first `p` indices along `k`.
    ///
    /// # Safety
    /// The memory of the operand reaches to the element at `i` and `p`.
    pub unsafe fn at(self, i: usize, p: usize) -> Self {
        // SAFETY: the caller guarantees that the sum is within the operand's memory.
        Self { ptr: unsafe { self.ptr.add(i * self.outer + p * self.inner) }, ..self }
    }
}

/// The dimension of a tile that comes from an operand: the rows from `a`, the columns from `b`.
#[derive(Clone, Copy)]
pub enum Along {
    /// Rows of the tile: the operand is read as vectors.
    Rows,
    /// Columns of the tile: the operand's elements are broadcast.
    Columns,
}

/// The number of elements that [`pack`] writes for `len` rows or columns and `k` indices along `k` (steps).
pub fn packed_len(shape: TileShape, along: Along, len: usize, k: usize) -> usize {
    match along {
        Along::Rows => len.next_multiple_of(shape.lanes) * k,
        Along::Columns => len.next_multiple_of(4) * k,
    }
}

/// Rows that are transposed at a time.
const ROWS: usize = 16;
/// Steps of `k` that are transposed at a time.
const RUN: usize = 64;

/// Packs `len × k` elements into panels that have as many rows or columns as a tile. A panel holds the elements of step
/// 0, then those of step 1, and so on. The last panel may have fewer rows, rounded up to whole registers, or fewer
/// columns, rounded up to a multiple of 4; the rows or columns after `len` are zeros.
///
/// # Safety
/// `src` is readable for `len × k` elements, `dst` writable for [`packed_len`] elements.
pub unsafe fn pack<T: Elem>(dst: *mut T::Acc, shape: TileShape, along: Along, src: Side<T>, len: usize, k: usize) {
    let (full, multiple) = match along {
        Along::Rows => (shape.rows, shape.lanes),
        Along::Columns => (shape.columns, 4),
    };
    for i in (0..len).step_by(full) {
        let rows = full.min(len - i);
        let width = full.min(rows.next_multiple_of(multiple));
        // SAFETY: the panel that starts at row `i` is within the memory of `dst` and of `src`.
        unsafe {
            let (dst, src) = (dst.add(i * k), src.at(i, 0));
            if src.outer != 1 {
                transpose(dst, src, rows, width, k);
            } else {
                match width {
                    _ if rows < width => copy::<T>(dst, src, rows, width, k),
                    4 => copy_exact::<T, 4>(dst, src, k),
                    8 => copy_exact::<T, 8>(dst, src, k),
                    12 => copy_exact::<T, 12>(dst, src, k),
                    16 => copy_exact::<T, 16>(dst, src, k),
                    24 => copy_exact::<T, 24>(dst, src, k),
                    32 => copy_exact::<T, 32>(dst, src, k),
                    _ => copy::<T>(dst, src, rows, width, k),
                }
            }
        }
    }
}

/// Packs a panel whose `N` elements of each step are contiguous in `src`.
unsafe fn copy_exact<T: Elem, const N: usize>(dst: *mut T::Acc, src: Side<T>, k: usize) {
    dispatch(
        #[inline(always)]
        || {
            for p in 0..k {
                // SAFETY: step `p` is within the caller's panel.
                unsafe {
                    let from = src.at(0, p).ptr.cast::<[T; N]>().read_unaligned();
                    dst.add(p * N).cast::<[T::Acc; N]>().write_unaligned(widen(from));
                }
            }
        },
    );
}

/// Converts elements to the accumulator's type.
#[inline(always)]
fn widen<T: Elem, const N: usize>(from: [T; N]) -> [T::Acc; N] {
    let mut to = [T::Acc::ZERO; N];
    for (x, y) in to.iter_mut().zip(from) {
        *x = y.to_acc();
    }
    to
}

/// Packs a panel whose `rows` elements of each step are contiguous in `src`, followed by `width - rows` zeros.
unsafe fn copy<T: Elem>(dst: *mut T::Acc, src: Side<T>, rows: usize, width: usize, k: usize) {
    for p in 0..k {
        for i in 0..width {
            // SAFETY: step `p` is within the caller's panel, and `src` is read at `rows` elements only.
            unsafe { *dst.add(p * width + i) = if i < rows { (*src.at(i, p).ptr).to_acc() } else { T::Acc::ZERO } };
        }
    }
}

/// Packs a panel whose elements of one step are not contiguous in `src`, 16 rows at a time.
unsafe fn transpose<T: Elem>(dst: *mut T::Acc, src: Side<T>, rows: usize, width: usize, k: usize) {
    let in_place = TypeId::of::<T>() == TypeId::of::<T::Acc>() && src.inner == 1;
    let mut copied = None;
    for p in (0..k).step_by(RUN) {
        let run = RUN.min(k - p);
        if src.inner == 1 {
            // Prefetch explicitly: the processor's own prefetching cannot follow as many streams as there are rows.
            for i in 0..rows {
                let next = src.ptr.wrapping_add(i * src.outer + p + RUN).cast::<u8>();
                let bytes = (k - p - run).min(RUN) * size_of::<T>();
                (0..bytes).step_by(LINE).for_each(|at| prefetch(next.wrapping_add(at)));
            }
        }
        for i in (0..width).step_by(ROWS) {
            let part = ROWS.min(width - i);
            // SAFETY: only rows below `rows` of `src` are read, and `part` rows and `run` steps of the panel are
            // written.
            unsafe {
                let src = src.at(i.min(rows), p);
                let (from, stride) = if in_place && i + part <= rows && run.is_multiple_of(ROWS) {
                    (src.ptr.cast(), src.outer)
                } else {
                    let copied = copied.get_or_insert([[T::Acc::ZERO; RUN]; ROWS]);
                    convert(copied, src, rows.saturating_sub(i), run);
                    (copied.as_ptr().cast(), RUN)
                };
                store_columns::<T::Acc>(from, stride, part, run, dst.add(p * width + i), width);
            }
        }
    }
}

/// Copies the first `run` elements of `rows` rows, converted to the accumulator's type. Of the [`ROWS`] rows of
/// `copied`, those after the first `rows` become zeros.
unsafe fn convert<T: Elem>(copied: &mut [[T::Acc; RUN]; ROWS], src: Side<T>, rows: usize, run: usize) {
    dispatch(
        #[inline(always)]
        || {
            for (i, row) in copied.iter_mut().enumerate() {
                if i >= rows {
                    *row = [T::Acc::ZERO; RUN];
                } else if src.inner == 1 && run.is_multiple_of(ROWS) {
                    for p in (0..run).step_by(ROWS) {
                        // SAFETY: row `i` of the caller has `run` elements, and `run` is at most RUN.
                        unsafe {
                            let from = src.at(i, p).ptr.cast::<[T; ROWS]>().read_unaligned();
                            let to = row.as_mut_ptr().add(p).cast::<[T::Acc; ROWS]>();
                            to.write_unaligned(widen(from));
                        }
                    }
                } else {
                    for (p, x) in row.iter_mut().enumerate().take(run) {
                        // SAFETY: row `i` of the caller has `run` elements.
                        *x = unsafe { *src.at(i, p).ptr }.to_acc();
                    }
                }
            }
        },
    );
}

/// Transposes `width` rows of `run` elements: writes each column of `width` elements contiguously. The starts of
/// neighbouring columns are `dst_stride` elements apart.
unsafe fn store_columns<T: Real>(
    src: *const T,
    src_stride: usize,
    width: usize,
    run: usize,
    dst: *mut T,
    dst_stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<T>() == TypeId::of::<f32>() && is_x86_feature_detected!("avx512f") {
        // SAFETY: `T` is f32 and the processor has AVX-512.
        return unsafe { transpose_avx512(src.cast(), src_stride, width, run, dst.cast(), dst_stride) };
    }
    for p in 0..run {
        for i in 0..width {
            // SAFETY: the caller guarantees that the rows are readable and the columns writable.
            unsafe { *dst.add(p * dst_stride + i) = *src.add(i * src_stride + p) };
        }
    }
}

/// [`store_columns`] in blocks of 16 × 16 elements. `width` is at most 16, and each row must be readable up to `run`
/// rounded up to a multiple of 16 elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_avx512(
    src: *const f32,
    src_stride: usize,
    width: usize,
    run: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    use std::arch::x86_64::*;
    let mask = ((1u32 << width) - 1) as __mmask16;
    for p in (0..run).step_by(16) {
        let mut rows = [_mm512_setzero_ps(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            if i < width {
                // SAFETY: the caller guarantees that row `i` is readable up to the next multiple of 16 elements.
                *row = unsafe { _mm512_loadu_ps(src.add(i * src_stride + p)) };
            }
        }
        // Interleave pairs of rows, then pairs of the results: the 128-bit lane `l` of `fours[4 g + c]` then holds
        // column `4 l + c` of the rows `4 g..4 g + 4`.
        let mut fours = [_mm512_setzero_pd(); 16];
        for g in 0..4 {
            let [r0, r1, r2, r3] = [rows[4 * g], rows[4 * g + 1], rows[4 * g + 2], rows[4 * g + 3]];
            let lo01 = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
            let hi01 = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
            let lo23 = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
            let hi23 = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
            fours[4 * g] = _mm512_unpacklo_pd(lo01, lo23);
            fours[4 * g + 1] = _mm512_unpackhi_pd(lo01, lo23);
            fours[4 * g + 2] = _mm512_unpacklo_pd(hi01, hi23);
            fours[4 * g + 3] = _mm512_unpackhi_pd(hi01, hi23);
        }
        // Join the four 128-bit lanes of each column, one for each group `g` of four rows.
        for c in 0..4 {
            let part = |g: usize| _mm512_castpd_ps(fours[4 * g + c]);
            let even01 = _mm512_shuffle_f32x4::<0x88>(part(0), part(1));
            let odd01 = _mm512_shuffle_f32x4::<0xdd>(part(0), part(1));
            let even23 = _mm512_shuffle_f32x4::<0x88>(part(2), part(3));
            let odd23 = _mm512_shuffle_f32x4::<0xdd>(part(2), part(3));
            let columns = [
                _mm512_shuffle_f32x4::<0x88>(even01, even23),
                _mm512_shuffle_f32x4::<0x88>(odd01, odd23),
                _mm512_shuffle_f32x4::<0xdd>(even01, even23),
                _mm512_shuffle_f32x4::<0xdd>(odd01, odd23),
            ];
            for (l, column) in columns.into_iter().enumerate() {
                let p = p + 4 * l + c;
                if p < run {
                    // SAFETY: column `p` is in the destination, and the mask selects its `width` elements.
                    unsafe { _mm512_mask_storeu_ps(dst.add(p * dst_stride), mask, column) };
                }
            }
        }
    }
}
