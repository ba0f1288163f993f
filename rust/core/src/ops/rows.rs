//! What kernels that work row by row share: blocks of rows for threads, sums in a fixed order.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real};

/// Elements that one thread takes at a time.
const GRAIN: usize = 32 * 1024;

/// Partial sums of a row: enough for two vectors of the widest instruction set.
const LANES: usize = 32;

/// How many rows of `len` elements one thread takes at a time. Depends on sizes only, so that results do too.
pub(super) fn rows_per_block(len: usize) -> usize {
    (GRAIN / len.max(1)).max(1)
}

/// A new contiguous buffer of `rows` rows of `len` elements. `write` gets a range of at most `block` rows and their elements,
/// on several threads.
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
    // SAFETY: within the capacity, and `write` has initialised all of it.
    unsafe { result.set_len(total) };
    result
}

/// Adds up the lanes in pairs.
#[inline(always)]
fn fold<R: Real>(mut lanes: [R; LANES], combine: impl Fn(R, R) -> R) -> R {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = combine(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `f` over a row.
#[inline(always)]
pub(super) fn sum<X: Copy, R: Real>(x: &[X], f: impl Fn(X) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let chunks = x.chunks_exact(LANES);
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(*x);
    }
    for x in chunks {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += f(*x);
        }
    }
    fold(lanes, |a, b| a + b)
}

/// The sum of `f` over the pairs of two rows of the same length.
#[inline(always)]
pub(super) fn sum_pairs<X: Copy, Y: Copy, R: Real>(x: &[X], y: &[Y], f: impl Fn(X, Y) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    for (lane, (x, y)) in lanes.iter_mut().zip(xs.remainder().iter().zip(ys.remainder())) {
        *lane += f(*x, *y);
    }
    for (x, y) in xs.zip(ys) {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane += f(*x, *y);
        }
    }
    fold(lanes, |a, b| a + b)
}

/// Two sums of `f` over three rows of the same length.
#[inline(always)]
pub(super) fn sums_of_three<X: Copy, Y: Copy, Z: Copy, R: Real>(
    x: &[X],
    y: &[Y],
    z: &[Z],
    f: impl Fn(X, Y, Z) -> [R; 2],
) -> [R; 2] {
    let (mut first, mut second) = ([R::ZERO; LANES], [R::ZERO; LANES]);
    let (xs, ys, zs) = (x.chunks_exact(LANES), y.chunks_exact(LANES), z.chunks_exact(LANES));
    let add = |first: &mut [R; LANES], second: &mut [R; LANES], x: &[X], y: &[Y], z: &[Z]| {
        for ((a, b), (x, (y, z))) in first.iter_mut().zip(second).zip(x.iter().zip(y.iter().zip(z))) {
            let [to_a, to_b] = f(*x, *y, *z);
            *a += to_a;
            *b += to_b;
        }
    };
    add(&mut first, &mut second, xs.remainder(), ys.remainder(), zs.remainder());
    for (x, (y, z)) in xs.zip(ys.zip(zs)) {
        add(&mut first, &mut second, x, y, z);
    }
    [fold(first, |a, b| a + b), fold(second, |a, b| a + b)]
}

/// The largest `f` of a row; NaN if there is one, negative infinity if the row is empty.
#[inline(always)]
pub(super) fn max_by<X: Copy, R: Real>(x: &[X], f: impl Fn(X) -> R) -> R {
    let mut lanes = [R::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = lane.max(f(*x));
    }
    for x in chunks {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = lane.max(f(*x));
        }
    }
    fold(lanes, Real::max)
}

/// The largest element of a row; NaN if there is one, negative infinity if the row is empty.
#[inline(always)]
pub(super) fn max<T: Elem>(x: &[T]) -> T::Acc {
    max_by(x, |x: T| x.to_acc())
}
