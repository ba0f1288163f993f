//! Folds over the middle one of three dimensions (outer, n, inner). Sums, maxima and minima use them.
//!
//! For each outer index, the elements are n rows of `inner` columns. The rows are cut into blocks, whose height depends
//! only on the dimensions. Several threads fold the blocks, then the results of the blocks are folded in the same way,
//! until one row is left. So the error of a sum grows with the logarithm of the number of blocks, and results do not
//! depend on the number of threads.

use super::pool::{GRAIN, SharedMut, par_ranges};
use super::simd::{Real, dispatch};

/// The largest number of columns that a task folds side by side. Their running results, one per column, stay in the
/// first-level cache.
pub(super) const TILE: usize = 2048;

/// The number of running results in the fold of adjacent elements (inner = 1), enough to fill a few vector registers.
const LANES: usize = 32;

/// A reduction's operation on two numbers, and the reduction's result for no numbers.
pub(super) trait Fold: Sync {
    /// The result for no elements.
    fn start<A: Real>() -> A;
    /// Combines two results, or a result and an element.
    fn join<A: Real>(a: A, b: A) -> A;
}

/// a + b.
pub(super) struct Sum;

/// The larger of two numbers; NaN if either is NaN.
pub(super) struct Max;

/// The smaller of two numbers; NaN if either is NaN.
pub(super) struct Min;

impl Fold for Sum {
    #[inline(always)]
    fn start<A: Real>() -> A {
        A::ZERO
    }
    #[inline(always)]
    fn join<A: Real>(a: A, b: A) -> A {
        a + b
    }
}

impl Fold for Max {
    #[inline(always)]
    fn start<A: Real>() -> A {
        A::NEG_INFINITY
    }
    #[inline(always)]
    fn join<A: Real>(a: A, b: A) -> A {
        a.max(b)
    }
}

impl Fold for Min {
    #[inline(always)]
    fn start<A: Real>() -> A {
        A::INFINITY
    }
    #[inline(always)]
    fn join<A: Real>(a: A, b: A) -> A {
        a.min(b)
    }
}

/// Folds `x`, of the shape (outer, n, inner), over n; `load` converts each element to the accumulator's type. Returns
/// the (outer, inner) results.
pub(super) fn fold<T: Copy + Sync, A: Real, F: Fold>(
    x: &[T],
    load: impl Fn(T) -> A + Copy + Sync,
    [outer, n, inner]: [usize; 3],
) -> Vec<A> {
    let tile = inner.clamp(1, TILE);
    let tiles = inner.div_ceil(tile);
    // The rows of a block, and the number of blocks for each outer index. One tile of a block has about GRAIN elements,
    // enough work for a thread. But a block has at least 32 rows, so that the results of the blocks are far fewer than
    // the elements, and at most 4096, which bounds the error of the sum of a block.
    let rows = (GRAIN / tile).clamp(32, 4096);
    let blocks = n.div_ceil(rows);
    if n == 0 {
        return vec![F::start(); outer * inner];
    }
    // The results of the blocks, of the shape (outer, blocks, inner).
    let mut partial = vec![F::start(); outer * blocks * inner];
    let shared = SharedMut::new(&mut partial);
    // The elements that a task folds. A thread takes at a time as many tasks as have about GRAIN elements.
    let work_per_task = tile * rows.min(n);
    par_ranges(outer * blocks * tiles, (GRAIN / work_per_task).max(1), |tasks| {
        for task in tasks {
            // Each task folds one tile of columns of one block. `block` counts the blocks of all outer indices.
            let (block, column) = (task / tiles, task % tiles * tile);
            let width = tile.min(inner - column);
            let (outer_index, row) = (block / blocks, block % blocks * rows);
            let height = rows.min(n - row);
            let x = &x[(outer_index * n + row) * inner + column..];
            // SAFETY: no two tasks fold the same columns of the same block.
            let result = unsafe { shared.slice(block * inner + column..block * inner + column + width) };
            if inner == 1 {
                result[0] = fold_row::<T, A, F>(&x[..height], load);
            } else {
                fold_columns::<T, A, F>(x, load, height, inner, result);
            }
        }
    });
    if blocks == 1 {
        return partial;
    }
    fold::<A, A, F>(&partial, std::convert::identity, [outer, blocks, inner])
}

/// Folds adjacent elements to one result.
fn fold_row<T: Copy, A: Real, F: Fold>(x: &[T], load: impl Fn(T) -> A + Copy) -> A {
    dispatch(
        #[inline(always)]
        || {
            let mut lanes = [F::start(); LANES];
            let chunks = x.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane = F::join(*lane, load(x));
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane = F::join(*lane, load(x));
            }
            // Fold the upper half of the running results into the lower half until one is left.
            let mut width = LANES / 2;
            while width > 0 {
                for i in 0..width {
                    lanes[i] = F::join(lanes[i], lanes[i + width]);
                }
                width /= 2;
            }
            lanes[0]
        },
    )
}

/// Folds `height` rows into `result`, which has one element for each column. The rows start `stride` elements apart.
fn fold_columns<T: Copy, A: Real, F: Fold>(
    x: &[T],
    load: impl Fn(T) -> A + Copy,
    height: usize,
    stride: usize,
    result: &mut [A],
) {
    dispatch(
        #[inline(always)]
        || {
            for row in 0..height {
                for (r, &x) in result.iter_mut().zip(&x[row * stride..]) {
                    *r = F::join(*r, load(x));
                }
            }
        },
    );
}
