//! The common part of CPU kernels that work row by row: how rows are divided into blocks for threads, and sums, maxima
//! and other reductions over a row in a fixed order.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real};

/// Number of elements that one thread takes at a time.
const GRAIN: usize = 32 * 1024;

/// Number of partial sums of a row: the number of f32 lanes of a vector in the widest instruction set. More partial
/// sums would make long rows slightly faster, but short rows, such as the scores of a short sequence, much slower.
const LANES: usize = 16;

/// How many rows of `len` elements one thread takes at a time. The number depends only on `len`, so that results do not
/// depend on the number of threads.
pub(super) fn rows_per_block(len: usize) -> usize {
    (GRAIN / len.max(1)).max(1)
}

/// A new contiguous buffer of `rows` rows of `len` elements. Several threads call `write`, each time with the indices
/// of at most `block` neighbouring rows and the memory of their elements.
///
/// # Safety
/// `write` must initialise every element that it is given.
pub(super) unsafe fn fill_rows<T: Elem>(
    rows: usize,
    len: usize,
    block: usize,
    write: impl Fn(Range<usize>, &mut [MaybeUninit<T>]) + Sync,
) -> Vec<T> {
    let total = rows * len;
    let mut result = Vec::with_capacity(total);
    par_chunks_mut(&mut result.spare_capacity_mut()[..total], block * len, |index, out| {
        let start = index * block;
        write(start..start + out.len() / len, out);
    });
    // SAFETY: `total` is within the capacity, and `write` has initialised all `total` elements.
    unsafe { result.set_len(total) };
    result
}

/// An array of the `results`, of which there are at most [`LANES`], filled up with `neutral`. This loop computes the
/// results, and another ([`join`]) joins them to the partial sums: the compiler vectorises two simple loops for every
/// element type, but not a single loop that does both.
#[inline(always)]
fn stage<R: Real>(neutral: R, results: impl Iterator<Item = R>) -> [R; LANES] {
    let mut stage = [neutral; LANES];
    for (slot, result) in stage.iter_mut().zip(results) {
        *slot = result;
    }
    stage
}

/// Joins each value of `stage` to the partial sum in the same lane of `lanes` by `operation`, such as an addition.
#[inline(always)]
fn join<R: Real>(lanes: &mut [R; LANES], stage: [R; LANES], operation: impl Fn(R, R) -> R) {
    for (lane, result) in lanes.iter_mut().zip(stage) {
        *lane = operation(*lane, result);
    }
}

/// Joins the lanes to one value: the upper half of them to the lower half, then the upper half of these, and so on.
#[inline(always)]
fn fold<R: Real>(mut lanes: [R; LANES], operation: impl Fn(R, R) -> R) -> R {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = operation(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn add<R: Real>(a: R, b: R) -> R {
    a + b
}

#[inline(always)]
fn larger<R: Real>(a: R, b: R) -> R {
    if b > a { b } else { a }
}

/// Joins the results of `f` for all elements of a row by `operation`, whose neutral element is `neutral`. Lane i joins
/// the elements i, i + [`LANES`], i + 2 [`LANES`] and so on. If the row ends with an incomplete chunk, the lanes begin
/// with the elements of this chunk, and go on from the start of the row. Then the lanes are folded to one value.
#[inline(always)]
fn reduce<X: Copy, R: Real>(x: &[X], neutral: R, f: impl Fn(X) -> R, operation: impl Fn(R, R) -> R) -> R {
    let chunks = x.chunks_exact(LANES);
    let mut lanes = stage(neutral, chunks.remainder().iter().map(|x| f(*x)));
    for x in chunks {
        join(&mut lanes, stage(neutral, x.iter().map(|x| f(*x))), &operation);
    }
    fold(lanes, operation)
}

/// The sum of `f` over a row.
#[inline(always)]
pub(super) fn sum<X: Copy, R: Real>(x: &[X], f: impl Fn(X) -> R) -> R {
    reduce(x, R::ZERO, f, add)
}

/// The largest value of `f` over a row; negative infinity if the row is empty. A NaN may be ignored or be the result.
#[inline(always)]
pub(super) fn max_by<X: Copy, R: Real>(x: &[X], f: impl Fn(X) -> R) -> R {
    reduce(x, R::NEG_INFINITY, f, larger)
}

/// The largest element of a row; negative infinity if the row is empty. A NaN may be ignored or be the result.
#[inline(always)]
pub(super) fn max<T: Elem>(x: &[T]) -> T::Acc {
    max_by(x, |x: T| x.to_acc())
}

/// The sum of `f(x[i], y[i])` over two rows of the same length.
#[inline(always)]
pub(super) fn sum_pairs<X: Copy, Y: Copy, R: Real>(x: &[X], y: &[Y], f: impl Fn(X, Y) -> R) -> R {
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(ys.remainder());
    let mut lanes = stage(R::ZERO, rest.map(|(x, y)| f(*x, *y)));
    for (x, y) in xs.zip(ys) {
        join(&mut lanes, stage(R::ZERO, x.iter().zip(y).map(|(x, y)| f(*x, *y))), add);
    }
    fold(lanes, add)
}

/// The sum of `f(x[i], y[i], z[i])` over three rows of the same length.
#[inline(always)]
pub(super) fn sum_triples<X: Copy, Y: Copy, Z: Copy, R: Real>(
    x: &[X],
    y: &[Y],
    z: &[Z],
    f: impl Fn(X, Y, Z) -> R,
) -> R {
    let (xs, ys, zs) = (x.chunks_exact(LANES), y.chunks_exact(LANES), z.chunks_exact(LANES));
    let rest = xs.remainder().iter().zip(ys.remainder().iter().zip(zs.remainder()));
    let mut lanes = stage(R::ZERO, rest.map(|(x, (y, z))| f(*x, *y, *z)));
    for (x, (y, z)) in xs.zip(ys.zip(zs)) {
        join(&mut lanes, stage(R::ZERO, x.iter().zip(y.iter().zip(z)).map(|(x, (y, z))| f(*x, *y, *z))), add);
    }
    fold(lanes, add)
}
