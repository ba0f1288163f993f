//! The innermost loops of a matrix product, written once for every instruction set.
//!
//! A tile of the result is held in registers: `V` vectors for each of `N` columns. For each index along `k` (a step),
//! the tile adds an outer product: vectors of consecutive rows of `a`, times broadcast elements of `b`. A tile sums
//! each element by one chain of multiply-adds in the order of the steps. So the sum does not depend on the tile's size
//! or on the element's row and column in the tile.

use pulp::{Simd, WithSimd};

use crate::cpu::Real;
use crate::cpu::lane::Lane;
use crate::cpu::simd::arch;

/// Returns the number of elements of type `T` in a SIMD register of `S`.
#[inline(always)]
pub const fn lanes<T: Lane, S: Simd>() -> usize {
    size_of::<T::Vector<S>>() / size_of::<T>()
}

/// The size of a full tile for one instruction set and one type of elements.
#[derive(Clone, Copy, Debug)]
pub struct TileShape {
    /// The number of elements in a SIMD register.
    pub lanes: usize,
    /// Rows of a full tile, a multiple of `lanes`.
    pub rows: usize,
    /// Columns of a full tile, a multiple of 4.
    pub columns: usize,
}

impl TileShape {
    /// Returns the full tile for `T` with the instruction set `S`.
    pub const fn of<T: Lane, S: Simd>() -> Self {
        let lanes = lanes::<T, S>();
        // 2 x 12 accumulators in 32 registers, or 3 x 4 in 16: enough chains to hide the latency of the multiply-add,
        // with registers left for the operands.
        if S::REGISTER_COUNT >= 32 {
            Self { lanes, rows: 2 * lanes, columns: 12 }
        } else {
            Self { lanes, rows: 3 * lanes, columns: 4 }
        }
    }

    /// Returns the full tile for `T` on this processor.
    pub fn detect<T: Real>() -> Self {
        // Passes the type `T` to `with_simd`, which gets the instruction set from `dispatch`.
        struct Detect<T>(std::marker::PhantomData<T>);
        impl<T: Lane> WithSimd for Detect<T> {
            type Output = TileShape;
            fn with_simd<S: Simd>(self, _: S) -> TileShape {
                TileShape::of::<T, S>()
            }
        }
        arch().dispatch(Detect::<T>(std::marker::PhantomData))
    }
}

/// An upper bound on the number of elements in a tile's registers, for all instruction sets: 32 registers of 16 `f32`.
const MAX_TILE: usize = 512;

/// Where a tile or a block of the result is written, and how.
#[derive(Clone, Copy)]
pub struct Target<T> {
    /// The first element.
    pub ptr: *mut T,
    /// Distance between neighbouring rows, in elements.
    pub row_stride: usize,
    /// Distance between neighbouring columns, in elements.
    pub column_stride: usize,
    /// The factor by which the product is multiplied.
    pub alpha: T,
    /// Whether the product is added to the values of the destination instead of replacing them.
    pub accumulate: bool,
}

/// Memory that will be read next: `ranges` contiguous ranges of `len` bytes each. The starts of neighbouring ranges are
/// `stride` bytes apart.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// The first byte of the first range that is not yet prefetched.
    pub ptr: *const u8,
    /// The number of ranges that are not yet prefetched.
    pub ranges: usize,
    /// The length of a range in bytes.
    pub len: usize,
    /// Distance between the starts of neighbouring ranges, in bytes.
    pub stride: usize,
}

/// The length of a cache line in bytes.
pub const LINE: usize = 64;

/// Prefetches the cache line of `address` into the L2 cache. The address may be any. Does nothing unless the processor
/// is x86-64.
#[inline(always)]
pub fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

impl Ahead {
    /// Returns how often [`fetch`](Self::fetch) must be called to prefetch all ranges.
    fn lines(&self) -> usize {
        self.ranges * self.len.div_ceil(LINE)
    }

    /// Prefetches the cache line at `offset` bytes in the first remaining range, then advances `offset` by a line.
    /// After the last line of a range, drops the range and resets `offset`. Does nothing if no range remains.
    #[inline(always)]
    fn fetch(&mut self, offset: &mut usize) {
        if self.ranges > 0 {
            prefetch(self.ptr.wrapping_add(*offset));
            *offset += LINE;
            if *offset >= self.len {
                *offset = 0;
                self.ptr = self.ptr.wrapping_add(self.stride);
                self.ranges -= 1;
            }
        }
    }
}

/// The operand of a tile whose elements are broadcast: its first element, and its strides along `k` and along the
/// columns.
#[derive(Clone, Copy)]
pub struct Broadcast<T> {
    /// The first element.
    pub ptr: *const T,
    /// Distance between neighbouring steps along `k`, in elements.
    pub step: usize,
    /// Distance between neighbouring columns, in elements.
    pub column: usize,
}

impl<T> Broadcast<T> {
    /// Describes a panel of `columns` columns that [`pack`](super::pack::pack) has written, padded to a multiple of 4
    /// columns.
    pub fn packed(ptr: *const T, columns: usize) -> Self {
        Self { ptr, step: columns.next_multiple_of(4), column: 1 }
    }
}

/// A run of consecutive steps along `k`, given by the offsets of the run's first step in the two operands, in elements.
/// [`Tile::k`] is its length.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Offset of the first step in `a`.
    pub a: usize,
    /// Offset of the first step in `b`.
    pub b: usize,
}

impl Run {
    /// A single run from the start of both operands.
    pub const WHOLE: [Self; 1] = [Self { a: 0, b: 0 }];
}

/// `c = alpha * a * b`, or `c += alpha * a * b`, for one panel of columns. `a` is packed by
/// [`pack`](super::pack::pack).
pub struct Columns<T> {
    /// The number of rows of `a` and `c`.
    pub m: usize,
    /// The number of columns of `b` and `c`, at most [`TileShape::columns`].
    pub n: usize,
    /// The number of columns of `a` and rows of `b`, the length of the sums.
    pub k: usize,
    /// The first packed panel of `a`.
    pub a: *const T,
    /// The panel of `b`, readable for `n` columns rounded up to a multiple of 4.
    pub b: Broadcast<T>,
    /// The result.
    pub c: Target<T>,
    /// The part of `b` that is used next: the next panel is packed from it, or read from it directly.
    pub ahead: Ahead,
}

impl<T: Real> Columns<T> {
    /// Computes the columns.
    ///
    /// # Safety
    /// `a` holds packed panels of `m × k` elements, and `b` is readable. The elements of `c` are valid, and nothing
    /// else reads or writes them meanwhile.
    pub unsafe fn run(self) {
        arch().dispatch(self);
    }
}

impl<T: Real> WithSimd for Columns<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let shape = TileShape::of::<T, S>();
        let mut ahead = self.ahead;
        // Where the next cache line begins in the first remaining range of `ahead`, in bytes.
        let mut offset = 0;
        let tiles = self.m.div_ceil(shape.rows).max(1);
        let lines_per_tile = ahead.lines().div_ceil(tiles);
        let mut i = 0;
        while i < self.m {
            for _ in 0..lines_per_tile {
                ahead.fetch(&mut offset);
            }
            let rows = shape.rows.min(self.m - i);
            // SAFETY: the caller of `run` guarantees that the panels and the destination are valid.
            unsafe {
                let tile = Tile {
                    runs: &Run::WHOLE,
                    k: self.k,
                    // The panels before row `i` are full, so they hold `i * k` elements.
                    a: self.a.add(i * self.k),
                    a_step: rows.next_multiple_of(shape.lanes),
                    b: self.b,
                    c: Target { ptr: self.c.ptr.add(i * self.c.row_stride), ..self.c },
                    rows,
                    columns: self.n,
                };
                tile.run(simd);
            }
            i += shape.rows;
        }
    }
}

/// Layout of broadcast elements: for each step, one element per column of the registers, without gaps.
const PACKED: u8 = 0;
/// Layout of broadcast elements: each column is contiguous along `k`.
const CONTIGUOUS_COLUMNS: u8 = 1;
/// Layout of broadcast elements: any strides.
const STRIDED: u8 = 2;

/// One tile of the result. Its registers may hold more rows and columns than the `rows × columns` elements that it
/// writes.
pub struct Tile<'a, T> {
    /// The runs of steps to sum over, in the order of the sum.
    pub runs: &'a [Run],
    /// Number of steps in each run.
    pub k: usize,
    /// The first element of `a`. Each step reads one element per row, with `rows` rounded up to whole registers.
    pub a: *const T,
    /// Distance between neighbouring steps in `a`, in elements.
    pub a_step: usize,
    /// The elements of `b`. Each step reads one element per column, with `columns` rounded up to a multiple of 4.
    pub b: Broadcast<T>,
    /// The result.
    pub c: Target<T>,
    /// The number of rows to write.
    pub rows: usize,
    /// The number of columns to write.
    pub columns: usize,
}

impl<T: Real> Tile<'_, T> {
    /// Computes the tile.
    ///
    /// # Safety
    /// `a` and `b` are readable at each of the `k` steps of each run. The `rows × columns` elements of `c` are valid,
    /// and nothing else reads or writes them meanwhile.
    #[inline(always)]
    pub unsafe fn run<S: Simd>(self, simd: S) {
        macro_rules! tiles {
            ($($v:literal x $n:literal),*) => {
                match (self.rows.div_ceil(lanes::<T, S>()), self.columns.next_multiple_of(4)) {
                    // `$v * $n` accumulators, `$v` vectors of `a` and an element of `b` must fit into the registers.
                    // Larger tiles do not occur.
                    $(($v, $n) if $v * $n + $v < S::REGISTER_COUNT => unsafe {
                        match self.b {
                            Broadcast { step: $n, column: 1, .. } => self.outer_products::<S, $v, $n, PACKED>(simd),
                            Broadcast { step: 1, .. } => self.outer_products::<S, $v, $n, CONTIGUOUS_COLUMNS>(simd),
                            _ => self.outer_products::<S, $v, $n, STRIDED>(simd),
                        }
                    },)*
                    _ => unreachable!("tile larger than the registers"),
                }
            };
        }
        // Not only the sizes of `TileShape` and smaller ones: thin products (`thin.rs`) use 4 x 4 and 1 x 16.
        tiles!(2 x 12, 1 x 12, 2 x 8, 1 x 8, 1 x 4, 2 x 4, 3 x 4, 4 x 4, 1 x 16);
    }

    /// Computes the tile with `V` registers for the rows of each of `N` columns; `LAYOUT` is the layout of `b`.
    #[inline(always)]
    unsafe fn outer_products<S: Simd, const V: usize, const N: usize, const LAYOUT: u8>(self, simd: S) {
        let lanes = lanes::<T, S>();
        let zero = T::splat(simd, T::ZERO);
        let mut acc = [[zero; V]; N];
        let (b_step, b_column) = match LAYOUT {
            PACKED => (N, 1),
            CONTIGUOUS_COLUMNS => (1, self.b.column),
            _ => (self.b.step, self.b.column),
        };
        for run in self.runs {
            // SAFETY: the caller guarantees that both operands are readable at each run.
            let (mut a, mut b) = unsafe { (self.a.add(run.a), self.b.ptr.add(run.b)) };
            for _ in 0..self.k {
                // SAFETY: for each of the `k` steps, `V * lanes` elements of `a` and `N` of `b` are readable.
                unsafe {
                    let mut vectors = [zero; V];
                    for (v, vector) in vectors.iter_mut().enumerate() {
                        *vector = a.add(v * lanes).cast::<T::Vector<S>>().read_unaligned();
                    }
                    for (n, column) in acc.iter_mut().enumerate() {
                        let element = T::splat(simd, *b.add(n * b_column));
                        for (sum, vector) in column.iter_mut().zip(vectors) {
                            *sum = T::multiply_add(simd, vector, element, *sum);
                        }
                    }
                    // `wrapping_add`, because there may be no memory after the last step.
                    a = a.wrapping_add(self.a_step);
                    b = b.wrapping_add(b_step);
                }
            }
        }
        if self.c.row_stride == 1 && self.rows == V * lanes {
            for (n, column) in acc.iter().enumerate() {
                if n == self.columns {
                    break;
                }
                for (v, &sum) in column.iter().enumerate() {
                    // SAFETY: all lanes are elements of the destination.
                    unsafe { self.finish(simd, sum, self.c.ptr.add(n * self.c.column_stride + v * lanes)) };
                }
            }
        } else {
            // The registers hold more rows than the tile has, or its columns are not contiguous: write through a copy.
            let mut copy = [T::ZERO; MAX_TILE];
            let copy = &mut copy[..N * V * lanes];
            let columns = self.columns;
            if self.c.accumulate {
                for (n, column) in copy.chunks_exact_mut(V * lanes).enumerate().take(columns) {
                    for (r, x) in column.iter_mut().enumerate().take(self.rows) {
                        // SAFETY: row `r` and column `n` are in the destination.
                        *x = unsafe { *self.c.ptr.add(n * self.c.column_stride + r * self.c.row_stride) };
                    }
                }
            }
            for (x, &sum) in copy.chunks_exact_mut(lanes).zip(acc.as_flattened()) {
                // SAFETY: `x` is as many elements as a register holds.
                unsafe { self.finish(simd, sum, x.as_mut_ptr()) };
            }
            for (n, column) in copy.chunks_exact(V * lanes).enumerate().take(columns) {
                for (r, &x) in column.iter().enumerate().take(self.rows) {
                    // SAFETY: row `r` and column `n` are in the destination.
                    unsafe { *self.c.ptr.add(n * self.c.column_stride + r * self.c.row_stride) = x };
                }
            }
        }
    }

    /// Multiplies one register of sums by `alpha`, and writes the products to `c` or adds them to `c`.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, simd: S, sum: T::Vector<S>, c: *mut T) {
        let (alpha, c) = (T::splat(simd, self.c.alpha), c.cast::<T::Vector<S>>());
        // SAFETY: the caller guarantees that `c` points to as many elements as a register holds.
        unsafe {
            c.write_unaligned(if self.c.accumulate {
                T::multiply_add(simd, alpha, sum, c.read_unaligned())
            } else {
                T::multiply(simd, alpha, sum)
            });
        }
    }
}
