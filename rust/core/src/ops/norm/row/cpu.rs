//! The CPU form of norms of rows: layer norm, RMS norm and modulated layer norm. Rows belong to samples: the rows of a
//! sample share a scale and a shift.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::Size;
use crate::cpu::pool::{SharedMut, par_ranges};
use crate::cpu::{Elem, Real, dispatch};
use crate::ops::rows;

/// Returns the norm of the rows of `x`; and, for each row, the mean and 1/√(var + eps). This is layer norm with
/// `CENTER`, RMS norm without: the mean then counts as 0 in the result and in var, and the vector of means is empty.
/// `weight` has the factors of the normalised values (the scale), `bias` has the shifts, both (samples, len).
pub(super) fn forward<T: Elem, const CENTER: bool>(
    size: Size,
    x: &[T],
    weight: &[T::Acc],
    bias: &[T::Acc],
    eps: T::Acc,
) -> (Vec<T>, [Vec<T::Acc>; 2]) {
    // `len` is the number of elements of a row.
    let (rows, len) = (size.rows(), size.len);
    let mut statistics = [vec![T::Acc::ZERO; if CENTER { rows } else { 0 }], vec![T::Acc::ZERO; rows]];
    let [means, rstds] = statistics.each_mut().map(|values| SharedMut::new(values));
    let count = T::Acc::from_f64(len as f64);
    let write_rows = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
        // SAFETY: ranges of rows do not overlap.
        let rstds = unsafe { rstds.slice(range.clone()) };
        // SAFETY: as above.
        let mut means = unsafe { means.slice(if CENTER { range.clone() } else { 0..0 }) }.iter_mut();
        let x = x[range.start * len..range.end * len].chunks_exact(len);
        dispatch(
            #[inline(always)]
            || {
                let results = out.chunks_exact_mut(len).zip(rstds.iter_mut());
                for (row, (x, (out, rstd_slot))) in range.zip(x.zip(results)) {
                    let center = if CENTER { rows::sum(x, |x: T| x.to_acc()) / count } else { T::Acc::ZERO };
                    let squares = rows::sum(x, |x: T| {
                        let d = x.to_acc() - center;
                        d * d
                    });
                    let rstd = T::Acc::ONE / (squares / count + eps).sqrt();
                    let (weight, bias) = (&weight[size.parameters(row)], &bias[size.parameters(row)]);
                    for ((o, x), (w, b)) in out.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
                        o.write(T::from_acc(((x.to_acc() - center) * rstd).mul_add(*w, *b)));
                    }
                    *rstd_slot = rstd;
                    if let Some(mean) = means.next() {
                        *mean = center;
                    }
                }
            },
        );
    };
    // SAFETY: each row is written as a whole.
    let y = unsafe { rows::fill_rows(rows, len, rows::rows_per_block(len), write_rows) };
    (y, statistics)
}

/// What the backward pass reads.
pub(super) struct BackwardPass<'a, T: Elem> {
    pub size: Size,
    pub x: &'a [T],
    /// The gradient of the result.
    pub grad: &'a [T],
    /// The mean of each row; not read without `CENTER`.
    pub mean: &'a [T::Acc],
    /// 1/√(var + eps) of each row.
    pub rstd: &'a [T::Acc],
    /// The factors of the normalised values, (samples, len).
    pub scale: &'a [T::Acc],
}

/// The minimum number of rows of a block, if gradients of scale and shift are wanted. Each block has its own partial
/// sums of these gradients, so a minimum limits the memory for the partial sums.
const MIN_BLOCK_ROWS: usize = 16;

impl<T: Elem> BackwardPass<'_, T> {
    /// Returns the gradient of the input, and the gradients of scale and shift, (samples, len) each. A gradient that is
    /// not wanted is empty.
    pub fn run<const CENTER: bool>(&self, wants_input: bool, wants_affine: bool) -> (Vec<T>, [Vec<T::Acc>; 2]) {
        let Size { samples, sample_rows, len } = self.size;
        // Threads compute blocks of rows. The rows of a block belong to one sample, which has `blocks` blocks.
        let block_rows = rows::rows_per_block(len).max(if wants_affine { MIN_BLOCK_ROWS } else { 1 });
        let blocks = if samples * len == 0 { 0 } else { sample_rows.div_ceil(block_rows) };
        let sums_len = if wants_affine { 2 * len } else { 0 };
        let mut partial = vec![T::Acc::ZERO; samples * blocks * sums_len];
        let total = if wants_input { samples * sample_rows * len } else { 0 };
        let mut grad_x = Vec::with_capacity(total);
        let partials = SharedMut::new(&mut partial);
        let results = SharedMut::new(&mut grad_x.spare_capacity_mut()[..total]);
        // The number of blocks that a thread takes at a time: several if a sample is a single, possibly small block.
        let grain = if blocks > 1 { 1 } else { rows::rows_per_block(sample_rows * len) };
        par_ranges(samples * blocks, grain, |range| {
            for index in range {
                let sample_start = index / blocks * sample_rows;
                let first = index % blocks * block_rows;
                let rows = sample_start + first..sample_start + sample_rows.min(first + block_rows);
                let elements = if wants_input { rows.start * len..rows.end * len } else { 0..0 };
                // SAFETY: each block writes its own ranges of `partial` and of `grad_x`.
                let partial = unsafe { partials.slice(index * sums_len..(index + 1) * sums_len) };
                // SAFETY: as above.
                let out: &mut [MaybeUninit<T>] = unsafe { results.slice(elements) };
                dispatch(
                    #[inline(always)]
                    || self.block::<CENTER>(rows, out, partial),
                );
            }
        });
        // SAFETY: the blocks cover all rows, and `block` writes every row that it is given.
        unsafe { grad_x.set_len(total) };
        let mut sums = [0, 1].map(|_| vec![T::Acc::ZERO; samples * sums_len / 2]);
        for (index, partial) in partial.chunks_exact(sums_len.max(1)).enumerate() {
            let start = index / blocks * len;
            // The first half of `partial` belongs to the scale, the second to the shift.
            for (sum, half) in sums.iter_mut().zip(partial.chunks_exact(len)) {
                for (s, p) in sum[start..start + len].iter_mut().zip(half) {
                    *s += *p;
                }
            }
        }
        (grad_x, sums)
    }

    /// Writes the input's gradient for the rows of `range` to `out`, unless `out` is empty. Adds these rows' part of
    /// the gradients of scale and shift to `partial`, unless `partial` is empty.
    #[inline(always)]
    fn block<const CENTER: bool>(&self, range: Range<usize>, out: &mut [MaybeUninit<T>], partial: &mut [T::Acc]) {
        let len = self.size.len;
        let count = T::Acc::from_f64(len as f64);
        let (grad_scale, grad_shift) = partial.split_at_mut(partial.len() / 2);
        let mut out = out.chunks_exact_mut(len);
        for row in range {
            let (x, g) = (&self.x[row * len..(row + 1) * len], &self.grad[row * len..(row + 1) * len]);
            let (mean, rstd) = (if CENTER { self.mean[row] } else { T::Acc::ZERO }, self.rstd[row]);
            let normalised = |x: T| (x.to_acc() - mean) * rstd;
            for ((dw, db), (x, g)) in grad_scale.iter_mut().zip(&mut *grad_shift).zip(x.iter().zip(g)) {
                *dw += g.to_acc() * normalised(*x);
                *db += g.to_acc();
            }
            let Some(out) = out.next() else { continue };
            // dx = rstd (g w - mean(g w) - x̂ mean(g w x̂)), where w is the scale and x̂ = (x - mean) rstd; without
            // `CENTER`, the term mean(g w) is missing.
            let scale = &self.scale[self.size.parameters(row)];
            let mean_gw =
                if CENTER { rows::sum_pairs(g, scale, |g: T, w| g.to_acc() * w) / count } else { T::Acc::ZERO };
            let mean_gwx = rows::sum_triples(x, g, scale, |x, g: T, w| g.to_acc() * w * normalised(x)) / count;
            for ((o, x), (g, w)) in out.iter_mut().zip(x).zip(g.iter().zip(scale)) {
                o.write(T::from_acc(rstd * (g.to_acc() * *w - mean_gw - normalised(*x) * mean_gwx)));
            }
        }
    }
}
