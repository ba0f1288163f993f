//! Divides the result of a product into blocks, and computes each block. A block is computed in tiles: a tile is the
//! part of the result that the innermost loop (`kernel.rs`) holds in SIMD registers. A `TileShape` has the numbers of a
//! tile's rows and columns, and the number of elements in a register (`lanes`).

use std::any::TypeId;
use std::cell::RefCell;

use super::kernel::{Ahead, Broadcast, Columns, Target, TileShape};
use super::narrow::{self, Narrow};
use super::pack::{Along, Side, pack, packed_len};
use super::thin::{self, Dot, Outer};
use crate::cpu::{Elem, Real, dispatch, pool};

/// The most indices along `k` that are packed at once, chosen so that a panel of `b` (the packed columns of one tile)
/// stays in the first-level cache.
const MAX_K: usize = 384;
/// The most rows of a block, chosen so that its packed `a` stays in the second-level cache.
const MAX_ROWS: usize = 512;
/// The most columns of a block.
const MAX_COLUMNS: usize = 4096;
/// The least `k` for which thin products, whose result has few columns or few rows, use [`Method::Outer`] or
/// [`Method::Dot`].
const MIN_THIN_K: usize = 64;
/// The most indices along `k` in one step of [`Method::Outer`], chosen so that the pages that hold these columns of `a`
/// stay in the translation buffer (TLB).
const OUTER_K: usize = 64;
/// A block of `b` is read in place instead of being packed if its last element begins fewer than this many bytes after
/// its first.
const MAX_IN_PLACE: usize = 32 << 10;
/// The least number of multiply-adds that is worth another thread.
const MIN_WORK: usize = 1 << 18;

/// A product `c = alpha * a * b`, or `c += alpha * a * b` with `accumulate`, given by pointers. `a` is (m, k), `b` is
/// (k, n) and `c` is (m, n). A `Side` has the stride `inner` along `k`, and the stride `outer` along its other
/// dimension. `side.at(i, p)` begins at index `i` of this other dimension and at index `p` along `k`, also for `b`.
#[derive(Clone, Copy)]
pub struct Product<A: Elem, B, C> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Side<A>,
    pub b: Side<B>,
    pub c: *mut C,
    /// Distances between neighbouring rows and between neighbouring columns of `c`, in elements.
    pub c_strides: [usize; 2],
    pub alpha: A::Acc,
    pub accumulate: bool,
}

// SAFETY: only `run` leads to accesses through the pointers. Its caller guarantees that they are valid on every thread.
unsafe impl<A: Elem, B: Elem, C: Elem> Sync for Product<A, B, C> {}

impl<A, B, C> Product<A, B, C>
where
    A: Elem,
    B: Elem<Acc = A::Acc>,
    C: Elem<Acc = A::Acc>,
{
    /// Computes `batch` products. For product i, `offsets(i)` returns how many elements after the `a`, `b` and `c` of
    /// `self` its own `a`, `b` and `c` begin.
    ///
    /// # Safety
    /// The operands are readable and the results writable at all their elements. No result shares an element with
    /// another result or with an operand.
    pub unsafe fn run(self, batch: usize, offsets: impl Fn(usize) -> [usize; 3] + Sync) {
        if self.m == 0 || self.n == 0 || batch == 0 {
            return;
        }
        // A SIMD vector holds neighbouring rows of one column of the result. So the large operand of a thin product
        // must be `a`, whose rows are those of the result. In the result of any other product, neighbouring rows should
        // be adjacent in memory. If a product is not of this form, compute its transpose.
        let is_thin = self.m.min(self.n) <= thin::max_columns() && self.k >= MIN_THIN_K;
        let method = match is_thin {
            true if self.n <= self.m => self.a.method(self.n),
            true => self.b.method(self.m),
            false => Method::Packed,
        };
        let has_form = match method {
            // If both strides are 1, the result is one row or one column; only a column has this form.
            Method::Packed => self.c_strides[0] == 1 && (self.c_strides[1] != 1 || self.m > 1),
            Method::Outer | Method::Dot => self.n <= self.m,
        };
        // SAFETY: the caller promises valid pointers; the transposed product accesses the same elements.
        unsafe {
            if has_form {
                self.run_blocks(method, batch, offsets);
            } else {
                self.transposed().run_blocks(method, batch, |i| {
                    let [a, b, c] = offsets(i);
                    [b, a, c]
                });
            }
        }
    }

    /// The product that computes the transpose of `c`.
    fn transposed(self) -> Product<B, A, C> {
        Product {
            m: self.n,
            n: self.m,
            k: self.k,
            a: self.b,
            b: self.a,
            c: self.c,
            c_strides: [self.c_strides[1], self.c_strides[0]],
            alpha: self.alpha,
            accumulate: self.accumulate,
        }
    }

    /// Computes `batch` products by `method`, with several threads if there is enough work.
    ///
    /// # Safety
    /// As [`run`](Self::run), and `a` has the contiguous columns or rows that `method` requires.
    unsafe fn run_blocks(self, method: Method, batch: usize, offsets: impl Fn(usize) -> [usize; 3] + Sync) {
        let shape = TileShape::detect::<A::Acc>();
        let work = self.m.saturating_mul(self.n).saturating_mul(self.k.max(1));
        let threads = pool::num_threads().min(work.saturating_mul(batch) / MIN_WORK).max(1);
        let [rows, columns] = block_size(shape, [self.m, self.n], threads.div_ceil(batch));
        let grid = [self.m.div_ceil(rows), self.n.div_ceil(columns)];
        let blocks = grid[0] * grid[1];
        // The number of blocks that a thread takes at once, as one range: about MIN_WORK multiply-adds, at least one
        // block.
        let grain = if threads == 1 { batch * blocks } else { (MIN_WORK / (work / blocks).max(1)).max(1) };
        let this = &self;
        pool::par_ranges(batch * blocks, grain, |range| {
            for task in range {
                let (product, block_index) = (task / blocks, task % blocks);
                // The first row and the first column of the block.
                let (i, j) = (block_index % grid[0] * rows, block_index / grid[0] * columns);
                let offset = offsets(product);
                // SAFETY: the pointers are moved to row `i` and column `j`, which exist; blocks of the result are
                // disjoint.
                unsafe {
                    let block = Self {
                        m: rows.min(this.m - i),
                        n: columns.min(this.n - j),
                        a: Side { ptr: this.a.ptr.add(offset[0]), ..this.a }.at(i, 0),
                        b: Side { ptr: this.b.ptr.add(offset[1]), ..this.b }.at(j, 0),
                        c: this.c.add(offset[2] + i * this.c_strides[0] + j * this.c_strides[1]),
                        ..*this
                    };
                    match method {
                        Method::Packed => block.packed(shape),
                        Method::Outer => block.outer(shape),
                        Method::Dot => block.dot(),
                    }
                }
            }
        });
    }

    /// The destination of the sums. With `direct` they are written to the result, which must then have the
    /// accumulator's type. Otherwise they are written to `sums`, and [`write`] rounds them into the result at the end.
    ///
    /// [`write`]: Self::write
    fn target(&self, direct: bool, sums: *mut A::Acc) -> Target<A::Acc> {
        if direct {
            let [row_stride, column_stride] = self.c_strides;
            Target { ptr: self.c.cast(), row_stride, column_stride, alpha: self.alpha, accumulate: self.accumulate }
        } else {
            Target { ptr: sums, row_stride: 1, column_stride: self.m, alpha: self.alpha, accumulate: false }
        }
    }

    /// Computes a thin block on the calling thread, as a sum of outer products: for each index along `k`, a column of
    /// `a` times a row of `b`. The columns of `a` are contiguous.
    unsafe fn outer(self, shape: TileShape) {
        // One panel takes all columns of `b`.
        let shape = TileShape { columns: self.n.next_multiple_of(4), ..shape };
        let stretch = self.k.min(OUTER_K);
        // Registers are loaded from `a` in place. The `rest` rows after the last whole register are packed.
        let rest = self.m % shape.lanes;
        let len_rest = packed_len(shape, Along::Rows, rest, stretch);
        let len_b = packed_len(shape, Along::Columns, self.n, stretch);
        // Each stretch of `k` reads and writes all sums, so if there are several, neighbouring rows of the sums should
        // be adjacent in memory.
        let direct = is_accumulator::<C>() && (self.c_strides[0] == 1 || self.k <= stretch);
        let len_c = if direct { 0 } else { self.m * self.n };
        with_scratch([len_rest, len_b, len_c], |[a_rest, b, sums]: [*mut A::Acc; 3]| {
            let target = self.target(direct, sums);
            for p in (0..self.k).step_by(stretch) {
                let k = stretch.min(self.k - p);
                // SAFETY: the caller guarantees that the operands and the result are valid; `with_scratch` gives the
                // panels and the sums the lengths asked for.
                unsafe {
                    pack(a_rest, shape, Along::Rows, self.a.at(self.m - rest, p), rest, k);
                    pack(b, shape, Along::Columns, self.b.at(0, p), self.n, k);
                    let c = Target { accumulate: target.accumulate || p > 0, ..target };
                    let a = self.a.at(0, p).ptr.cast();
                    Outer { m: self.m, n: self.n, k, a, a_step: self.a.inner, a_rest, b, c }.run();
                }
            }
            if !direct {
                // SAFETY: `sums` holds the m × n sums of the block.
                unsafe { self.write(sums) };
            }
        });
    }

    /// Computes a thin block on the calling thread, as dot products. The rows of `a` are contiguous.
    unsafe fn dot(self) {
        let direct = is_accumulator::<C>();
        let len_c = if direct { 0 } else { self.m * self.n };
        let in_place = self.b.inner == 1 && is_accumulator::<B>();
        let len_b = if in_place { 0 } else { self.n * self.k };
        with_scratch([0, len_b, len_c], |[_, b, sums]: [*mut A::Acc; 3]| {
            // SAFETY: the caller guarantees that the operands and the result are valid; `with_scratch` gives the copy
            // of `b` and the sums the lengths asked for.
            unsafe {
                let (b, b_step) = if in_place {
                    (self.b.ptr.cast(), self.b.outer)
                } else {
                    for j in 0..self.n {
                        for p in 0..self.k {
                            *b.add(j * self.k + p) = (*self.b.at(j, p).ptr).to_acc();
                        }
                    }
                    (b.cast_const(), self.k)
                };
                let c = self.target(direct, sums);
                let Self { m, n, k, .. } = self;
                if is_accumulator::<A>() {
                    Dot { m, n, k, a: self.a.ptr.cast(), a_step: self.a.outer, b, b_step, c }.run();
                } else {
                    Narrow { m, n, k, a: self.a.ptr, a_step: self.a.outer, b, b_step, c }.run();
                }
                if !direct {
                    self.write(sums);
                }
            }
        });
    }

    /// Computes a block on the calling thread. `a` is packed. `b` is packed too, except that the panels of a small `b`
    /// that have a multiple of 4 columns are read in place.
    unsafe fn packed(self, shape: TileShape) {
        // `k` is divided into stretches of the same length, at most MAX_K; the last may be shorter. If there are
        // several, this length is a multiple of 16, because `pack` transposes 16 indices along `k` at a time.
        let stretches = self.k.div_ceil(MAX_K).max(1);
        let stretch = self.k.div_ceil(stretches).next_multiple_of(16).min(self.k);
        let len_a = packed_len(shape, Along::Rows, self.m, stretch);
        let in_place = self.b.is_small(self.n, self.k);
        // The scratch for `b` has room for one panel: a panel is packed just before its use, and stays in the
        // first-level cache meanwhile.
        let len_b = packed_len(shape, Along::Columns, shape.columns.min(self.n), stretch);
        // f16 and bf16 results are summed in a block of the accumulator's type and rounded at the end.
        let direct = is_accumulator::<C>();
        let len_c = if direct { 0 } else { self.m * self.n };
        with_scratch([len_a, len_b, len_c], |[a, b, sums]: [*mut A::Acc; 3]| {
            let target = self.target(direct, sums);
            let mut p = 0;
            // The body runs once even if k = 0, and then writes sums of zero.
            loop {
                let k = stretch.min(self.k - p);
                // SAFETY: the caller guarantees that the operands and the result are valid; `with_scratch` gives the
                // panels and the sums the lengths asked for.
                unsafe {
                    pack(a, shape, Along::Rows, self.a.at(0, p), self.m, k);
                    for j in (0..self.n).step_by(shape.columns) {
                        let n = shape.columns.min(self.n - j);
                        // The next panel of `b` is prefetched during this one. After the last panel, `ahead` is empty.
                        let next = j + n;
                        let ahead = self.b.at(next.min(self.n - 1), p).ahead(shape.columns.min(self.n - next), k);
                        let b = if in_place && n.is_multiple_of(4) {
                            Broadcast { ptr: self.b.at(j, p).ptr.cast(), step: self.b.inner, column: self.b.outer }
                        } else {
                            pack(b, shape, Along::Columns, self.b.at(j, p), n, k);
                            Broadcast::packed(b.cast_const(), n)
                        };
                        let c = Target {
                            ptr: target.ptr.add(j * target.column_stride),
                            accumulate: target.accumulate || p > 0,
                            ..target
                        };
                        Columns { m: self.m, n, k, a, b, c, ahead }.run();
                    }
                }
                p += k;
                if p == self.k {
                    break;
                }
            }
            if !direct {
                // SAFETY: `sums` holds the m × n sums of the block.
                unsafe { self.write(sums) };
            }
        });
    }

    /// Writes a block of sums, stored by columns, to the result or adds it to the result, with rounding to `C`. The
    /// sums are already multiplied by `alpha`.
    unsafe fn write(self, sums: *const A::Acc) {
        let ([row_stride, column_stride], accumulate) = (self.c_strides, self.accumulate);
        for j in 0..self.n {
            // SAFETY: column `j` of the sums and of the result is valid, and the result's elements are distinct.
            unsafe {
                let sums = std::slice::from_raw_parts(sums.add(j * self.m), self.m);
                let c = self.c.add(j * column_stride);
                if row_stride == 1 {
                    let c = std::slice::from_raw_parts_mut(c, self.m);
                    dispatch(
                        #[inline(always)]
                        || {
                            for (c, &sum) in c.iter_mut().zip(sums) {
                                *c = C::from_acc(if accumulate { c.to_acc() + sum } else { sum });
                            }
                        },
                    );
                } else {
                    for (i, &sum) in sums.iter().enumerate() {
                        let c = c.add(i * row_stride);
                        *c = C::from_acc(if accumulate { (*c).to_acc() + sum } else { sum });
                    }
                }
            }
        }
    }
}

/// How a block is computed.
#[derive(Clone, Copy)]
enum Method {
    /// `a` is packed, and so is `b` unless it is small; for any product.
    Packed,
    /// The product is thin, and `a` has contiguous columns.
    Outer,
    /// The product is thin, and `a` has contiguous rows.
    Dot,
}

impl<T: Elem> Side<T> {
    /// True if the first `len × k` elements need no conversion and span so few bytes that they stay in the first-level
    /// cache.
    fn is_small(self, len: usize, k: usize) -> bool {
        let extent = len.saturating_sub(1) * self.outer + k.saturating_sub(1) * self.inner;
        is_accumulator::<T>() && extent * size_of::<T>() < MAX_IN_PLACE
    }

    /// The contiguous ranges of the first `len × k` elements, to be prefetched; no ranges if neither stride is 1.
    fn ahead(self, len: usize, k: usize) -> Ahead {
        let (ranges, range_len, stride) = match (self.outer, self.inner) {
            (_, 1) => (len, k, self.outer),
            (1, _) => (k, len, self.inner),
            _ => (0, 0, 0),
        };
        let size = size_of::<T>();
        Ahead { ptr: self.ptr.cast(), ranges, len: range_len * size, stride: stride * size }
    }

    /// The method for a thin product whose large operand is `self` and whose small operand has `columns` columns.
    fn method(self, columns: usize) -> Method {
        match (self.outer, self.inner) {
            // f16 and bf16 are converted in registers if the columns are few, otherwise when they are packed.
            (_, 1) if !is_accumulator::<T>() && columns <= narrow::MAX_COLUMNS => Method::Dot,
            _ if !is_accumulator::<T>() => Method::Packed,
            (1, _) => Method::Outer,
            (_, 1) => Method::Dot,
            _ => Method::Packed,
        }
    }
}

/// True if elements of `T` need no conversion.
fn is_accumulator<T: Elem>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

/// Rows and columns of each block of an (m, n) result, at most MAX_ROWS and MAX_COLUMNS. The result is divided into
/// equal blocks, at least `parts` if it is large enough; then the size of a block is rounded up to whole vectors and to
/// multiples of 4 columns.
fn block_size(shape: TileShape, [m, n]: [usize; 2], parts: usize) -> [usize; 2] {
    // The largest numbers of blocks along the rows and along the columns.
    let max_grid = [m.div_ceil(shape.lanes), n.div_ceil(4)];
    let mut grid = [m.div_ceil(MAX_ROWS), n.div_ceil(MAX_COLUMNS)];
    while grid[0] * grid[1] < parts {
        // Dividing the longer side of a block minimises the elements that are packed.
        let (rows, columns) = (m / grid[0], n / grid[1]);
        if grid[0] < max_grid[0] && (rows >= columns || grid[1] >= max_grid[1]) {
            grid[0] += 1;
        } else if grid[1] < max_grid[1] {
            grid[1] += 1;
        } else {
            break;
        }
    }
    [m.div_ceil(grid[0]).next_multiple_of(shape.lanes), n.div_ceil(grid[1]).next_multiple_of(4)]
}

/// Scratch memory in units of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "only its size and alignment matter")] [u8; 64]);

/// Calls `f` with three disjoint regions of at least `lens` elements, each starting at a cache line. The regions are
/// not cleared: they may hold what an earlier call on this thread left. `f` must not call this function.
pub fn with_scratch<T: Real, R>(lens: [usize; 3], f: impl FnOnce([*mut T; 3]) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let lines = lens.map(|len| (len * size_of::<T>()).div_ceil(64));
        let total = lines.iter().sum();
        if scratch.len() < total {
            scratch.resize(total, Line([0; 64]));
        }
        let first = scratch.as_mut_ptr();
        let mut start = 0;
        f(lines.map(|count| {
            // SAFETY: the regions are within the scratch, which has `total` lines.
            let region = unsafe { first.add(start) };
            start += count;
            region.cast()
        }))
    })
}
