//! The CPU form of the Cayley transform. For each skew-symmetric matrix Q (n x n), Gauss-Jordan elimination solves
//! (I + Q) D = -2 Q. D, called `change`, is the result of the operation: I + D is the transform. In the code, n is
//! `size`, and `triangle` the number of elements of a strict upper triangle.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::rows;
use super::CAYLEY;
use crate::compute::contiguous;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// The results D, from the strict upper triangles (count, n (n - 1) / 2) of the matrices Q. The second argument is the
/// shape of the results, (count, n, n).
pub(super) fn forward(upper: &Raw, [count, size, _]: [usize; 3]) -> Result<Raw> {
    let upper = contiguous(upper)?;
    let (triangle, square) = (size * (size - 1) / 2, size * size);
    dispatch_float!(upper.dtype(), CAYLEY.name, T => read_all(CAYLEY.name, &[&upper], |operands| {
        let upper = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let mut system = vec![<T as Elem>::Acc::ZERO; 2 * square];
            for (matrix, out) in range.zip(out.chunks_exact_mut(square)) {
                fill(&upper[matrix * triangle..(matrix + 1) * triangle], size, &mut system);
                dispatch(#[inline(always)] || eliminate(&mut system, size));
                let solution = system.chunks_exact(2 * size).flat_map(|row| &row[size..]);
                for (out, value) in out.iter_mut().zip(solution) {
                    out.write(T::from_acc(*value));
                }
            }
        };
        // A thread takes few matrices at a time if one needs much work, which grows as n³.
        let block = rows::rows_per_block(square * size);
        // SAFETY: `write` writes every element of each matrix.
        Ok(unsafe { rows::fill_rows(count, square, block, write) })
    })
    .map(|change| from_vec(change, &[count, size, size][..])))
}

/// Fills `system` with (I + Q | -2 Q), `size` rows of 2 `size` elements. `upper` is the strict upper triangle of Q.
fn fill<T: Elem>(upper: &[T], size: usize, system: &mut [T::Acc]) {
    system.fill(Real::ZERO);
    let mut upper = upper.iter();
    for row in 0..size {
        system[row * 2 * size + row] = Real::ONE;
        // `upper` is the second argument of `zip`, so the end of a row takes no element from it.
        for (column, q) in (row + 1..size).zip(&mut upper) {
            let q = q.to_acc();
            system[row * 2 * size + column] = q;
            system[column * 2 * size + row] = -q;
            system[row * 2 * size + size + column] = -(q + q);
            system[column * 2 * size + size + row] = q + q;
        }
    }
}

/// Solves the system by Gauss-Jordan elimination. Afterwards the right half of `system` has D, and the left half is not
/// valid. Rows are not exchanged, because all pivots are at least 1: the symmetric part of I + Q is I, and elimination
/// keeps the symmetric part of the remaining matrix at I plus a positive semidefinite matrix.
#[inline(always)]
fn eliminate<R: Real>(system: &mut [R], size: usize) {
    let width = 2 * size;
    for pivot in 0..size {
        let (above, rest) = system.split_at_mut(pivot * width);
        let (pivot_row, below) = rest.split_at_mut(width);
        let inverse = R::ONE / pivot_row[pivot];
        pivot_row[pivot + 1..].iter_mut().for_each(|x| *x *= inverse);
        for row in above.chunks_exact_mut(width).chain(below.chunks_exact_mut(width)) {
            let factor = row[pivot];
            for (x, y) in row[pivot + 1..].iter_mut().zip(&pivot_row[pivot + 1..]) {
                *x -= factor * *y;
            }
        }
    }
}

/// The gradients (count, n (n - 1) / 2) of the upper triangles, from the gradient of the results and the results,
/// (count, n, n) each.
pub(super) fn backward(grad: &Raw, change: &Raw) -> Result<Raw> {
    let (grad, change) = (contiguous(grad)?, contiguous(change)?);
    let (count, size) = (grad.dims()[0], grad.dims()[1]);
    let (triangle, square) = (size * (size - 1) / 2, size * size);
    let op = CAYLEY.name;
    dispatch_float!(grad.dtype(), op, T => read_all(op, &[&grad, &change], |operands| {
        let (grad, change) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let to_accumulators = |x: &[T]| x.iter().map(|x| x.to_acc()).collect::<Vec<_>>();
            for (matrix, out) in range.zip(out.chunks_exact_mut(triangle)) {
                let at = matrix * square..(matrix + 1) * square;
                let (grad, change) = (to_accumulators(&grad[at.clone()]), to_accumulators(&change[at]));
                let values = dispatch(#[inline(always)] || gradient(&grad, &change, size));
                for (out, value) in out.iter_mut().zip(values) {
                    out.write(T::from_acc(value));
                }
            }
        };
        let block = rows::rows_per_block(square * size);
        // The triangle of a 1 x 1 matrix is empty: there is nothing to write.
        let (count, len) = if triangle > 0 { (count, triangle) } else { (0, 1) };
        // SAFETY: `write` writes every element of each triangle.
        Ok(unsafe { rows::fill_rows(count, len, block, write) })
    })
    .map(|grad_upper| from_vec(grad_upper, &[count, triangle][..])))
}

/// The gradient of the strict upper triangle of one Q, from D (`change`) and its gradient G (`grad`). With
/// V = (I + Q)⁻¹ = I + D / 2 and P = Vᵀ G Vᵀ, element (i, j) has the gradient 2 (P_ji - P_ij).
#[inline(always)]
fn gradient<R: Real>(grad: &[R], change: &[R], size: usize) -> Vec<R> {
    let half = R::from_f64(0.5);
    // Vᵀ G = G + Dᵀ G / 2.
    let mut vt_g = grad.to_vec();
    for (change_row, grad_row) in change.chunks_exact(size).zip(grad.chunks_exact(size)) {
        for (sums, d) in vt_g.chunks_exact_mut(size).zip(change_row) {
            let factor = half * *d;
            for (sum, g) in sums.iter_mut().zip(grad_row) {
                *sum += factor * *g;
            }
        }
    }
    // An element of P = Vᵀ G + Vᵀ G Dᵀ / 2.
    let element = |row: usize, column: usize| {
        let (vt_g, change) = (&vt_g[row * size..(row + 1) * size], &change[column * size..(column + 1) * size]);
        let product: R = vt_g.iter().zip(change).map(|(x, d)| *x * *d).sum();
        vt_g[column] + half * product
    };
    let pairs = (0..size).flat_map(|row| (row + 1..size).map(move |column| (row, column)));
    pairs.map(|(row, column)| R::from_f64(2.0) * (element(column, row) - element(row, column))).collect()
}
