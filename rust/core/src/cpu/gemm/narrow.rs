//! Products of an f16 or bf16 matrix with a matrix of a few columns. A language model that generates one token computes
//! such products.
//!
//! The elements of the f16 or bf16 matrix are converted in registers, and the matrix is not packed. So a product takes
//! about as long as reading this matrix once.

use super::kernel::Target;
use crate::cpu::{Elem, Real, dispatch};

/// The largest number of columns for which the matrix is read in place. For more columns, packing the matrix once is
/// less work than converting it for every four columns.
pub const MAX_COLUMNS: usize = 8;
/// Columns that are computed at a time.
const COLUMNS: usize = 4;
/// Elements of a row of `a` that are processed at a time. The f32 sums of four columns, 4 × 16 numbers, then fill half
/// of the registers of AVX2 and of NEON.
const RUN: usize = 16;

/// `c = alpha * a * b`, or `c += alpha * a * b`, as dot products. The rows of `a` and the columns of `b` are
/// contiguous.
pub struct Narrow<T: Elem> {
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
    pub b: *const T::Acc,
    /// Distance between the starts of neighbouring columns of `b`, in elements.
    pub b_step: usize,
    /// The result.
    pub c: Target<T::Acc>,
}

impl<T: Elem> Narrow<T> {
    /// Computes the product.
    ///
    /// # Safety
    /// The operands are readable, and nothing else reads or writes the elements of `c` meanwhile.
    pub unsafe fn run(self) {
        dispatch(
            #[inline(always)]
            || {
                for i in 0..self.m {
                    for j in (0..self.n).step_by(COLUMNS) {
                        // SAFETY: the result has row `i`, and `n - j` columns from column `j` on.
                        unsafe {
                            match self.n - j {
                                1 => self.row::<1>(i, j),
                                2 => self.row::<2>(i, j),
                                3 => self.row::<3>(i, j),
                                _ => self.row::<COLUMNS>(i, j),
                            }
                        }
                    }
                }
            },
        );
    }

    /// Computes `N` elements of row `i` from column `j` on.
    #[inline(always)]
    unsafe fn row<const N: usize>(&self, i: usize, j: usize) {
        /// Independent partial sums for a single column, so that additions do not wait for each other.
        const CHAINS: usize = 4;
        // SAFETY: the caller guarantees that row `i` of `a` and columns `j..j + N` of `b` and `c` exist.
        unsafe {
            let a = self.a.add(i * self.a_step);
            let b: [*const T::Acc; N] = std::array::from_fn(|n| self.b.add((j + n) * self.b_step));
            let chains = if N == 1 { CHAINS } else { 1 };
            let mut sums = [[[T::Acc::ZERO; RUN]; N]; CHAINS];
            let mut p = 0;
            while p + chains * RUN <= self.k {
                for (chain, sums) in sums.iter_mut().take(chains).enumerate() {
                    add_run(sums, a.add(p + chain * RUN), b.map(|b| b.add(p + chain * RUN)));
                }
                p += chains * RUN;
            }
            while p + RUN <= self.k {
                add_run(&mut sums[0], a.add(p), b.map(|b| b.add(p)));
                p += RUN;
            }
            let [mut first, others @ ..] = sums;
            for other in others.iter().take(chains - 1) {
                for (sums, other) in first.iter_mut().zip(other) {
                    for (sum, &other) in sums.iter_mut().zip(other) {
                        *sum += other;
                    }
                }
            }
            for (n, sums) in first.iter().enumerate() {
                let mut sum = sums.iter().fold(T::Acc::ZERO, |sum, &x| sum + x);
                for p in p..self.k {
                    sum = (*a.add(p)).to_acc().mul_add(*b[n].add(p), sum);
                }
                let sum = self.c.alpha * sum;
                let c = self.c.ptr.add(i * self.c.row_stride + (j + n) * self.c.column_stride);
                *c = if self.c.accumulate { *c + sum } else { sum };
            }
        }
    }
}

/// Multiplies [`RUN`] elements of a row with the elements at the same indices of each of `N` columns, and adds the
/// products to `sums`.
///
/// # Safety
/// `a` and all of `b` point to at least [`RUN`] readable elements.
#[inline(always)]
unsafe fn add_run<T: Elem, const N: usize>(sums: &mut [[T::Acc; RUN]; N], a: *const T, b: [*const T::Acc; N]) {
    // SAFETY: as the caller promises.
    let row: [T; RUN] = unsafe { a.cast::<[T; RUN]>().read_unaligned() };
    let row: [T::Acc; RUN] = std::array::from_fn(|lane| row[lane].to_acc());
    for n in 0..N {
        // SAFETY: as the caller promises.
        let column = unsafe { b[n].cast::<[T::Acc; RUN]>().read_unaligned() };
        for lane in 0..RUN {
            sums[n][lane] = row[lane].mul_add(column[lane], sums[n][lane]);
        }
    }
}
