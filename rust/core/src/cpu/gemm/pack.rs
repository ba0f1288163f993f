//! Packing: copies a block of an operand into panels and converts it to the accumulator's type. The elements of a panel
//! are in the order in which a tile reads them. In the functions of this file, a row is a row of the operand `a` or a
//! column of the operand `b`, and a step is an index along `k`.

use std::any::TypeId;

use super::kernel::{LINE, TileShape, prefetch};
use crate::cpu::{Elem, Real, dispatch};

/// One operand of a product as a strided matrix; strides are in elements.
#[derive(Clone, Copy)]
pub struct Side<T> {
    /// The first element.
    pub ptr: *const T,
    /// Distance between neighbouring rows of `a` or columns of `b`.
    pub outer: usize,
    /// Distance between neighbouring indices along `k`.
    pub inner: usize,
}

impl<T> Side<T> {
    /// Returns the operand without its first `i` rows and its first `p` steps.
    ///
    /// # Safety
    /// Element (`i`, `p`) is in the operand's memory, or begins at the end of this memory.
    pub unsafe fn at(self, i: usize, p: usize) -> Self {
        // SAFETY: the caller guarantees that the pointer stays within the operand's memory or at its end.
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

/// Returns the number of elements that [`pack`] writes for `len` rows and `k` steps. The rows are padded to whole SIMD
/// registers or, for [`Along::Columns`], to a multiple of 4, as the number of columns of every tile is.
pub fn packed_len(shape: TileShape, along: Along, len: usize, k: usize) -> usize {
    match along {
        Along::Rows => len.next_multiple_of(shape.lanes) * k,
        Along::Columns => len.next_multiple_of(4) * k,
    }
}

/// The number of rows and of steps in a square block, which AVX-512 transposes in registers.
const BLOCK: usize = 16;
/// The most steps that are transposed at a time.
const STEPS: usize = 64;

/// Packs `len` rows and `k` steps into panels that are as wide as a tile: [`TileShape::rows`] or
/// [`TileShape::columns`]. A panel holds the elements of step 0, then those of step 1, and so on. The last panel may be
/// narrower; its width is a multiple of a register's elements for [`Along::Rows`], and of 4 for [`Along::Columns`].
/// Rows after the first `len` are zeros.
///
/// # Safety
/// `src` is readable for `len × k` elements, `dst` writable for [`packed_len`] elements.
pub unsafe fn pack<T: Elem>(dst: *mut T::Acc, shape: TileShape, along: Along, src: Side<T>, len: usize, k: usize) {
    let (tile_width, multiple) = match along {
        Along::Rows => (shape.rows, shape.lanes),
        Along::Columns => (shape.columns, 4),
    };
    for i in (0..len).step_by(tile_width) {
        let rows = tile_width.min(len - i);
        let width = tile_width.min(rows.next_multiple_of(multiple));
        // SAFETY: the panel that starts at row `i` is within the memory of `dst` and of `src`.
        unsafe {
            let (dst, src) = (dst.add(i * k), src.at(i, 0));
            if src.outer != 1 {
                transpose(dst, src, rows, width, k);
            } else {
                // A width that the compiler knows lets it copy by vectors.
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
    for (wide, x) in to.iter_mut().zip(from) {
        *wide = x.to_acc();
    }
    to
}

/// Packs a panel whose `rows` elements of each step are contiguous in `src`. Writes `width - rows` zeros after them.
unsafe fn copy<T: Elem>(dst: *mut T::Acc, src: Side<T>, rows: usize, width: usize, k: usize) {
    for p in 0..k {
        for i in 0..width {
            // SAFETY: step `p` is within the caller's panel, and `src` is read at `rows` elements only.
            unsafe { *dst.add(p * width + i) = if i < rows { (*src.at(i, p).ptr).to_acc() } else { T::Acc::ZERO } };
        }
    }
}

/// Packs a panel whose elements of one step are not contiguous in `src`. Its rows after the first `rows` become zeros.
unsafe fn transpose<T: Elem>(dst: *mut T::Acc, src: Side<T>, rows: usize, width: usize, k: usize) {
    let readable_in_place = TypeId::of::<T>() == TypeId::of::<T::Acc>() && src.inner == 1;
    let mut copied = None;
    for p in (0..k).step_by(STEPS) {
        let steps = STEPS.min(k - p);
        if src.inner == 1 {
            // Prefetch the next steps: the processor's own prefetching cannot follow as many streams as there are rows.
            for i in 0..rows {
                let next = src.ptr.wrapping_add(i * src.outer + p + STEPS).cast::<u8>();
                let bytes = (k - p - steps).min(STEPS) * size_of::<T>();
                (0..bytes).step_by(LINE).for_each(|at| prefetch(next.wrapping_add(at)));
            }
        }
        for i in (0..width).step_by(BLOCK) {
            let block_rows = BLOCK.min(width - i);
            // SAFETY: only rows below `rows` of `src` are read, and `block_rows` rows and `steps` steps of the panel
            // are written.
            unsafe {
                // Of a block of padding alone, nothing is read. `min` keeps its pointer within the operand.
                let src = src.at(i.min(rows), p);
                // AVX-512 reads whole blocks, so an incomplete block is read from a copy that is large enough.
                let is_whole = i + block_rows <= rows && steps.is_multiple_of(BLOCK);
                let (from, stride) = if readable_in_place && is_whole {
                    (src.ptr.cast(), src.outer)
                } else {
                    let copied = copied.get_or_insert([[T::Acc::ZERO; STEPS]; BLOCK]);
                    convert(copied, src, rows.saturating_sub(i), steps);
                    (copied.as_ptr().cast(), STEPS)
                };
                store_columns::<T::Acc>(from, stride, block_rows, steps, dst.add(p * width + i), width);
            }
        }
    }
}

/// Copies the first `steps` elements of each of the first [`BLOCK`] rows of `src`, converted to the accumulator's type.
/// Only the first `rows` rows of `src` are read; any further rows of `copied` become zeros.
unsafe fn convert<T: Elem>(copied: &mut [[T::Acc; STEPS]; BLOCK], src: Side<T>, rows: usize, steps: usize) {
    dispatch(
        #[inline(always)]
        || {
            for (i, row) in copied.iter_mut().enumerate() {
                if i >= rows {
                    *row = [T::Acc::ZERO; STEPS];
                } else if src.inner == 1 && steps.is_multiple_of(BLOCK) {
                    // Arrays of a length that the compiler knows are converted by vectors.
                    for p in (0..steps).step_by(BLOCK) {
                        // SAFETY: row `i` of the caller has `steps` elements, and `steps` is at most STEPS.
                        unsafe {
                            let from = src.at(i, p).ptr.cast::<[T; BLOCK]>().read_unaligned();
                            let to = row.as_mut_ptr().add(p).cast::<[T::Acc; BLOCK]>();
                            to.write_unaligned(widen(from));
                        }
                    }
                } else {
                    for (p, x) in row.iter_mut().enumerate().take(steps) {
                        // SAFETY: row `i` of the caller has `steps` elements.
                        *x = unsafe { *src.at(i, p).ptr }.to_acc();
                    }
                }
            }
        },
    );
}

/// Transposes `rows` rows, at most [`BLOCK`], of `steps` elements each: writes the `rows` elements of each step
/// contiguously. The starts of neighbouring rows in `src` are `src_stride` elements apart, and those of neighbouring
/// steps in `dst` are `dst_stride` elements apart. Each row must be readable up to `steps` rounded up to a multiple of
/// [`BLOCK`].
unsafe fn store_columns<T: Real>(
    src: *const T,
    src_stride: usize,
    rows: usize,
    steps: usize,
    dst: *mut T,
    dst_stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<T>() == TypeId::of::<f32>() && is_x86_feature_detected!("avx512f") {
        // SAFETY: `T` is f32, the processor has AVX-512, and the caller guarantees the rest.
        return unsafe { transpose_avx512(src.cast(), src_stride, rows, steps, dst.cast(), dst_stride) };
    }
    for p in 0..steps {
        for i in 0..rows {
            // SAFETY: the caller guarantees that `src` is readable and `dst` writable.
            unsafe { *dst.add(p * dst_stride + i) = *src.add(i * src_stride + p) };
        }
    }
}

/// Does what [`store_columns`] does, in blocks of 16 × 16 elements.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_avx512(
    src: *const f32,
    src_stride: usize,
    rows: usize,
    steps: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    use std::arch::x86_64::*;
    // Selects the first `rows` of 16 elements.
    let mask = ((1u32 << rows) - 1) as __mmask16;
    for p in (0..steps).step_by(16) {
        let mut block = [_mm512_setzero_ps(); 16];
        for (i, row) in block.iter_mut().enumerate() {
            if i < rows {
                // SAFETY: the caller guarantees that row `i` is readable up to the next multiple of 16 elements.
                *row = unsafe { _mm512_loadu_ps(src.add(i * src_stride + p)) };
            }
        }
        // Interleave pairs of rows, then pairs of the results. Then the 128-bit lane `l` of `fours[4 g + c]` holds step
        // `4 l + c` of the rows `4 g..4 g + 4`.
        let mut fours = [_mm512_setzero_pd(); 16];
        for g in 0..4 {
            let [r0, r1, r2, r3] = [block[4 * g], block[4 * g + 1], block[4 * g + 2], block[4 * g + 3]];
            let lo01 = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
            let hi01 = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
            let lo23 = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
            let hi23 = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
            fours[4 * g] = _mm512_unpacklo_pd(lo01, lo23);
            fours[4 * g + 1] = _mm512_unpackhi_pd(lo01, lo23);
            fours[4 * g + 2] = _mm512_unpacklo_pd(hi01, hi23);
            fours[4 * g + 3] = _mm512_unpackhi_pd(hi01, hi23);
        }
        // Join the four 128-bit lanes of each step, one for each group `g` of four rows. 0x88 selects the lanes 0 and 2
        // of both operands, 0xdd the lanes 1 and 3.
        for c in 0..4 {
            let group = |g: usize| _mm512_castpd_ps(fours[4 * g + c]);
            let even01 = _mm512_shuffle_f32x4::<0x88>(group(0), group(1));
            let odd01 = _mm512_shuffle_f32x4::<0xdd>(group(0), group(1));
            let even23 = _mm512_shuffle_f32x4::<0x88>(group(2), group(3));
            let odd23 = _mm512_shuffle_f32x4::<0xdd>(group(2), group(3));
            // `joined[l]` holds step `4 l + c` of all 16 rows.
            let joined = [
                _mm512_shuffle_f32x4::<0x88>(even01, even23),
                _mm512_shuffle_f32x4::<0x88>(odd01, odd23),
                _mm512_shuffle_f32x4::<0xdd>(even01, even23),
                _mm512_shuffle_f32x4::<0xdd>(odd01, odd23),
            ];
            for (l, elements) in joined.into_iter().enumerate() {
                let p = p + 4 * l + c;
                if p < steps {
                    // SAFETY: step `p` is in the destination, and the mask selects its `rows` elements.
                    unsafe { _mm512_mask_storeu_ps(dst.add(p * dst_stride), mask, elements) };
                }
            }
        }
    }
}
