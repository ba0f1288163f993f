//! Products of a large f16 or bf16 matrix with a matrix of a few columns. A language model computes such products when
//! it generates one token.
//!
//! The elements of the large matrix are converted to f32 in registers, and the matrix is not packed. So a product takes
//! about as long as reading this matrix once.

use super::kernel::Target;
use crate::cpu::{Elem, Real, dispatch};

/// The largest number of columns for which the large matrix is read in place. For more columns, packing it once is less
/// work than converting it once for every four columns.
pub const MAX_COLUMNS: usize = 8;
/// Columns of the result that are computed at a time.
const COLUMNS: usize = 4;
/// Elements of a row of `a` that are processed at a time. The f32 sums of four columns, 4 × 16 numbers, then fill half
/// of the registers of AVX2 and of NEON.
const RUN: usize = 16;

/// A product `c = alpha * a * b`, or `c += alpha * a * b`, as dot products. `a` is the large matrix; `b` and `c` have a
/// few columns and already the dtype of sums, `T::Acc`. The rows of `a` and the columns of `b` are contiguous.
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
    /// The result, with `alpha` and whether the product is added to it.
    pub c: Target<T::Acc>,
}

impl<T: Elem> Narrow<T> {
    /// Computes the product.
    ///
    /// # Safety
    /// The operands are readable. The elements of `c` are valid, and nothing else reads or writes them meanwhile.
    pub unsafe fn run(self) {
        dispatch(
            #[inline(always)]
            || {
                for i in 0..self.m {
                    for j in (0..self.n).step_by(COLUMNS) {
                        // SAFETY: the result has row `i`, and `n - j` columns from column `j` on.
                        unsafe {
                            match self.n - j {
                                1 => self.row_elements::<1>(i, j),
                                2 => self.row_elements::<2>(i, j),
                                3 => self.row_elements::<3>(i, j),
                                _ => self.row_elements::<COLUMNS>(i, j),
                            }
                        }
                    }
                }
            },
        );
    }

    /// Computes the `N` elements of row `i` of `c` from column `j` on.
    #[inline(always)]
    unsafe fn row_elements<const N: usize>(&self, i: usize, j: usize) {
        /// Independent partial sums for a single column, so that additions do not wait for each other. Several columns
        /// have independent sums already, and use one chain each.
        const CHAINS: usize = 4;
        // SAFETY: the caller guarantees that row `i` of `a` and columns `j..j + N` of `b` and `c` exist.
        unsafe {
            let a = self.a.add(i * self.a_step);
            let b: [*const T::Acc; N] = std::array::from_fn(|n| self.b.add((j + n) * self.b_step));
            let chains = if N == 1 { CHAINS } else { 1 };
            // `sums[chain][column][lane]`: `lane` is the index of an element in its run.
            let mut sums = [[[T::Acc::ZERO; RUN]; N]; CHAINS];
            let mut p = 0;
            while p + chains * RUN <= self.k {
                for (chain, sums) in sums.iter_mut().take(chains).enumerate() {
                    add_run(sums, a.add(p + chain * RUN), b.map(|b| b.add(p + chain * RUN)));
                }
                p += chains * RUN;
            }
            // The remaining runs, fewer than one for each chain.
            while p + RUN <= self.k {
                add_run(&mut sums[0], a.add(p), b.map(|b| b.add(p)));
                p += RUN;
            }
            let [mut totals, other_chains @ ..] = sums;
            for sums in other_chains.iter().take(chains - 1) {
                for (totals, sums) in totals.iter_mut().zip(sums) {
                    for (total, &sum) in totals.iter_mut().zip(sums) {
                        *total += sum;
                    }
                }
            }
            for (n, totals) in totals.iter().enumerate() {
                let mut sum = totals.iter().fold(T::Acc::ZERO, |sum, &x| sum + x);
                // The remaining elements, fewer than a run.
                for rest in p..self.k {
                    sum = (*a.add(rest)).to_acc().mul_add(*b[n].add(rest), sum);
                }
                let product = self.c.alpha * sum;
                let c = self.c.ptr.add(i * self.c.row_stride + (j + n) * self.c.column_stride);
                *c = if self.c.accumulate { *c + product } else { product };
            }
        }
    }
}

/// Multiplies [`RUN`] elements of a row by the elements at the same indices of each of `N` columns, and adds the
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
