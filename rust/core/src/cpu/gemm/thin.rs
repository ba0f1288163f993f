//! Thin products, whose result has few columns or few rows. For example, one operand is a low-rank factor of an
//! adapter, or a batch of one row.
//!
//! A thin product uses each element of its large operand for only a few multiply-adds, so the large operand is read in
//! place instead of being packed.

use pulp::{Simd, WithSimd};

use super::kernel::{Broadcast, Run, Target, Tile, lanes};
use crate::cpu::Real;
use crate::cpu::simd::arch;

/// Returns the largest number of columns of a thin product for which the registers of this processor hold the
/// accumulators and operands.
pub fn max_columns() -> usize {
    struct Detect;
    impl WithSimd for Detect {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            if S::REGISTER_COUNT >= 32 { 16 } else { 12 }
        }
    }
    arch().dispatch(Detect)
}

/// A product `c = alpha * a * b`, or `c += alpha * a * b`, as a sum of `k` outer products. The columns of `a` are
/// contiguous.
pub struct Outer<T> {
    /// Rows of `a` and `c`.
    pub m: usize,
    /// Columns of `b` and `c`, at most [`max_columns`].
    pub n: usize,
    /// Columns of `a` and rows of `b`.
    pub k: usize,
    /// The first column of `a`.
    pub a: *const T,
    /// Distance between the starts of neighbouring columns of `a`, in elements.
    pub a_step: usize,
    /// A packed panel of the last rows of `a`, which do not fill a register. Not read if all rows fill registers.
    pub a_rest: *const T,
    /// `b` as one packed panel.
    pub b: *const T,
    /// The result.
    pub c: Target<T>,
}

impl<T: Real> Outer<T> {
    /// Computes the product.
    ///
    /// # Safety
    /// The operands are readable. The elements of `c` are valid, and nothing else reads or writes them meanwhile.
    pub unsafe fn run(self) {
        arch().dispatch(self);
    }
}

impl<T: Real> WithSimd for Outer<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // The number of elements of a register.
        let lanes = lanes::<T, S>();
        // The columns for which a tile has accumulators: tiles exist only for multiples of 4, and the panel of `b` is
        // padded to one.
        let columns = self.n.next_multiple_of(4);
        let b = Broadcast::packed(self.b, self.n);
        // The number of registers for the rows of one column of a tile. A tile has `vectors * columns` accumulators,
        // which must fit into the processor's registers.
        let vectors = match (columns, S::REGISTER_COUNT >= 32) {
            (4, true) => 4,
            (4, false) => 3,
            (8 | 12, true) => 2,
            _ => 1,
        };
        let full_rows = self.m / lanes * lanes;
        let mut i = 0;
        while i < self.m {
            // The last rows, which do not fill a register, are read from a packed panel one register wide.
            let (rows, a, a_step) = if i < full_rows {
                // SAFETY: `a` has row `i`.
                ((vectors * lanes).min(full_rows - i), unsafe { self.a.add(i) }, self.a_step)
            } else {
                (self.m - i, self.a_rest, lanes)
            };
            // `Run::WHOLE`: the tile sums over all `k` in one run, from the start of both operands.
            // SAFETY: the caller of `run` guarantees that the operands and the result are valid.
            unsafe {
                let c = Target { ptr: self.c.ptr.add(i * self.c.row_stride), ..self.c };
                Tile { runs: &Run::WHOLE, k: self.k, a, a_step, b, c, rows, columns: self.n }.run(simd);
            }
            i += rows;
        }
    }
}

/// A product `c = alpha * a * b`, or `c += alpha * a * b`, as dot products. The rows of `a` and the columns of `b` are
/// contiguous.
pub struct Dot<T> {
    /// Rows of `a` and `c`.
    pub m: usize,
    /// Columns of `b` and `c`.
    pub n: usize,
    /// Length of the dot products.
    pub k: usize,
    /// The first row of `a`.
    pub a: *const T,
    /// Distance between the starts of neighbouring rows of `a`, in elements.
    pub a_step: usize,
    /// The first column of `b`.
    pub b: *const T,
    /// Distance between the starts of neighbouring columns of `b`, in elements.
    pub b_step: usize,
    /// The result.
    pub c: Target<T>,
}

impl<T: Real> Dot<T> {
    /// Computes the product.
    ///
    /// # Safety
    /// The operands are readable. The elements of `c` are valid, and nothing else reads or writes them meanwhile.
    pub unsafe fn run(self) {
        arch().dispatch(self);
    }

    /// Computes the elements of `c` in the `R` rows from `i` on and the `N` columns from `j` on.
    #[expect(clippy::needless_range_loop, reason = "with iterators the sums do not stay in registers")]
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const N: usize>(&self, simd: S, i: usize, j: usize) {
        // The number of elements of a register, and the part of `k` that fills whole registers.
        let lanes = lanes::<T, S>();
        let full_k = self.k / lanes * lanes;
        let zero = T::splat(simd, T::ZERO);
        let mut acc = [[zero; R]; N];
        // SAFETY: rows `i..i + R` of `a` and columns `j..j + N` of `b` exist, and so do their elements of `c`.
        unsafe {
            let a: [*const T; R] = std::array::from_fn(|r| self.a.add((i + r) * self.a_step));
            let b: [*const T; N] = std::array::from_fn(|n| self.b.add((j + n) * self.b_step));
            let mut p = 0;
            while p < full_k {
                let mut columns = [zero; N];
                for n in 0..N {
                    columns[n] = b[n].add(p).cast::<T::Vector<S>>().read_unaligned();
                }
                for r in 0..R {
                    let row = a[r].add(p).cast::<T::Vector<S>>().read_unaligned();
                    for n in 0..N {
                        acc[n][r] = T::multiply_add(simd, row, columns[n], acc[n][r]);
                    }
                }
                p += lanes;
            }
            // The elements that are left; `load_part` fills the other lanes of the register with zeros.
            if full_k < self.k {
                for r in 0..R {
                    let row = T::load_part(simd, std::slice::from_raw_parts(a[r].add(full_k), self.k - full_k));
                    for n in 0..N {
                        let column = T::load_part(simd, std::slice::from_raw_parts(b[n].add(full_k), self.k - full_k));
                        acc[n][r] = T::multiply_add(simd, row, column, acc[n][r]);
                    }
                }
            }
            for n in 0..N {
                for r in 0..R {
                    let product = self.c.alpha * T::sum_lanes(simd, acc[n][r]);
                    let c = self.c.ptr.add((i + r) * self.c.row_stride + (j + n) * self.c.column_stride);
                    *c = if self.c.accumulate { *c + product } else { product };
                }
            }
        }
    }

    /// Computes the `R` rows of `c` from row `i` on.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, simd: S, i: usize) {
        let mut j = 0;
        while j < self.n {
            // SAFETY: the result has `n - j` columns from column `j` on.
            unsafe {
                match self.n - j {
                    1 => self.tile::<S, R, 1>(simd, i, j),
                    2 => self.tile::<S, R, 2>(simd, i, j),
                    3 => self.tile::<S, R, 3>(simd, i, j),
                    _ => self.tile::<S, R, 4>(simd, i, j),
                }
            }
            j += 4;
        }
    }
}

impl<T: Real> WithSimd for Dot<T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // A tile has 6 × 4 accumulators in 32 registers, or 2 × 4 in 16.
        let tile_rows = if S::REGISTER_COUNT >= 32 { 6 } else { 2 };
        let mut i = 0;
        while i < self.m {
            // SAFETY: the caller of `run` guarantees that the operands and the result are valid.
            unsafe {
                if self.m - i < tile_rows {
                    self.rows::<S, 1>(simd, i);
                    i += 1;
                } else {
                    if S::REGISTER_COUNT >= 32 {
                        self.rows::<S, 6>(simd, i);
                    } else {
                        self.rows::<S, 2>(simd, i);
                    }
                    i += tile_rows;
                }
            }
        }
    }
}
