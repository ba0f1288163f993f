//! The CPU form: Gauss-Jordan elimination of one matrix after another.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::rows;
use super::CAYLEY;
use crate::compute::contiguous;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

pub(super) fn forward(upper: &Raw, [count, size, _]: [usize; 3]) -> Result<Raw> {
    let upper = contiguous(upper)?;
    let (triangle, square) = (size * (size - 1) / 2, size * size);
    dispatch_float!(upper.dtype(), CAYLEY.name, T => read_all(CAYLEY.name, &[&upper], |operands| {
        let upper = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let mut system = vec![<T as Elem>::Acc::ZERO; 2 * square];
            for (block, out) in range.zip(out.chunks_exact_mut(square)) {
                fill(&upper[block * triangle..(block + 1) * triangle], size, &mut system);
                dispatch(#[inline(always)] || eliminate(&mut system, size));
                let solutions = system.chunks_exact(2 * size).flat_map(|row| &row[size..]);
                for (out, value) in out.iter_mut().zip(solutions) {
                    out.write(T::from_acc(*value));
                }
            }
        };
        // SAFETY: each matrix is written as a whole.
        Ok(unsafe { rows::fill_rows(count, square, rows::rows_per_block(square * size), write) })
    })
    .map(|change| from_vec(change, &[count, size, size][..])))
}

/// Fills `system` with (I + Q | -2 Q), `size` rows of 2 `size` elements. `upper` is the strict upper triangle of Q.
fn fill<T: Elem>(upper: &[T], size: usize, system: &mut [T::Acc]) {
    system.fill(Real::ZERO);
    let mut upper = upper.iter();
    for row in 0..size {
        system[row * 2 * size + row] = Real::ONE;
        for (column, q) in (row + 1..size).zip(&mut upper) {
            let q = q.to_acc();
            system[row * 2 * size + column] = q;
            system[column * 2 * size + row] = -q;
            system[row * 2 * size + size + column] = -(q + q);
            system[column * 2 * size + size + row] = q + q;
        }
    }
}

/// Gauss-Jordan elimination, which leaves D in the right half of `system`. The left half is not valid afterwards. All
/// pivots are at least 1, so rows are not exchanged.
#[inline(always)]
fn eliminate<R: Real>(system: &mut [R], size: usize) {
    let width = 2 * size;
    for pivot in 0..size {
        let (above, rest) = system.split_at_mut(pivot * width);
        let (own, below) = rest.split_at_mut(width);
        let inverse = R::ONE / own[pivot];
        own[pivot + 1..].iter_mut().for_each(|x| *x *= inverse);
        for row in above.chunks_exact_mut(width).chain(below.chunks_exact_mut(width)) {
            let factor = row[pivot];
            for (x, own) in row[pivot + 1..].iter_mut().zip(&own[pivot + 1..]) {
                *x -= factor * *own;
            }
        }
    }
}

pub(super) fn backward(grad: &Raw, result: &Raw) -> Result<Raw> {
    let (grad, result) = (contiguous(grad)?, contiguous(result)?);
    let (count, size) = (grad.dims()[0], grad.dims()[1]);
    let (triangle, square) = (size * (size - 1) / 2, size * size);
    let op = CAYLEY.name;
    dispatch_float!(grad.dtype(), op, T => read_all(op, &[&grad, &result], |operands| {
        let (grad, result) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let wide = |x: &[T]| x.iter().map(|x| x.to_acc()).collect::<Vec<_>>();
            for (block, out) in range.zip(out.chunks_exact_mut(triangle)) {
                let at = block * square..(block + 1) * square;
                let (grad, change) = (wide(&grad[at.clone()]), wide(&result[at]));
                let values = dispatch(#[inline(always)] || gradient(&grad, &change, size));
                for (out, value) in out.iter_mut().zip(values) {
                    out.write(T::from_acc(value));
                }
            }
        };
        let block = rows::rows_per_block(square * size);
        // SAFETY: each triangle is written as a whole.
        Ok(unsafe { rows::fill_rows(if triangle > 0 { count } else { 0 }, triangle.max(1), block, write) })
    })
    .map(|upper| from_vec(upper, &[count, triangle][..])))
}

/// The gradient of one triangle of Q, from D (`change`) and its gradient G (`grad`), with V = (I + Q)⁻¹ = I + D / 2.
#[inline(always)]
fn gradient<R: Real>(grad: &[R], change: &[R], size: usize) -> Vec<R> {
    let half = R::from_f64(0.5);
    // Vᵀ G = G + Dᵀ G / 2.
    let mut left = grad.to_vec();
    for (change, grad) in change.chunks_exact(size).zip(grad.chunks_exact(size)) {
        for (left, change) in left.chunks_exact_mut(size).zip(change) {
            let factor = half * *change;
            for (left, grad) in left.iter_mut().zip(grad) {
                *left += factor * *grad;
            }
        }
    }
    // An element of `left` Vᵀ, with Vᵀ = I + Dᵀ / 2.
    let element = |row: usize, column: usize| {
        let (left, change) = (&left[row * size..(row + 1) * size], &change[column * size..(column + 1) * size]);
        let products: R = left.iter().zip(change).map(|(l, c)| *l * *c).sum();
        left[column] + half * products
    };
    let pairs = (0..size).flat_map(|row| (row + 1..size).map(move |column| (row, column)));
    pairs.map(|(row, column)| R::from_f64(2.0) * (element(column, row) - element(row, column))).collect()
}
