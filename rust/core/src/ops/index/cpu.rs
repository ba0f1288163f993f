//! The CPU form of picking elements by integer ids (`index_select`, `embedding`, `gather`), and of its gradients. All
//! ids are checked before the first is used.
//!
//! A tensor is treated as (outer, size, inner), where `size` is the dimension that is indexed; o, j (or an id) and i
//! are indices in these three. If ids repeat, one thread adds the gradients of an element, in the order of their j.

use super::super::rows::rows_per_block;
use super::checked_ids;
use crate::compute::contiguous;
use crate::cpu::pool::par_chunks_mut;
use crate::cpu::{Elem, Real, dispatch, elements, read_all};
use crate::raw::{check_allocation, from_vec, is_float};
use crate::{Raw, Result, dispatch_float};

/// Number of elements that one thread gathers at a time.
const GRAIN: usize = 32 * 1024;

/// The product of the sizes of the dimensions after `dim`.
fn inner_size(dims: &[usize], dim: usize) -> usize {
    dims[dim + 1..].iter().product()
}

/// `dims` with `size` in place of dimension `dim`.
fn with_size(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

/// Computes `y[o, j, i] = x[o, ids[j], i]`.
pub fn select(op: &'static str, x: &Raw, ids: &Raw, dim: usize) -> Result<Raw> {
    let indices = checked_ids(op, ids, x.dims()[dim])?;
    if !is_float(x.dtype()) {
        return Ok(x.contiguous()?.index_select(&ids.flatten_all()?.contiguous()?, dim)?);
    }
    let dims = with_size(x.dims(), dim, indices.len());
    let len = check_allocation(op, &dims, x.dtype())?;
    let (size, inner) = (x.dims()[dim], inner_size(&dims, dim));
    let x = contiguous(x)?;
    dispatch_float!(x.dtype(), op, T => read_all(op, &[&x], |x| {
        let x = elements::<T>(x[0])?;
        let mut y = vec![T::from_acc(Real::ZERO); len];
        if len > 0 {
            // The number of rows of `y` that one thread takes at a time.
            let rows = rows_per_block(inner);
            par_chunks_mut(&mut y, rows * inner, |piece, y| {
                // A row is y[o, j, ..].
                for (row, y) in y.chunks_mut(inner).enumerate() {
                    let row = piece * rows + row;
                    let (o, j) = (row / indices.len(), row % indices.len());
                    let from = (o * size + indices[j]) * inner;
                    y.copy_from_slice(&x[from..from + inner]);
                }
            });
        }
        Ok(y)
    })
    .map(|y| from_vec(y, dims.as_slice())))
}

/// The gradient of [`select`]: `dx[o, ids[j], i] += g[o, j, i]`, with `size` elements along `dim`.
pub fn select_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    let indices = checked_ids(op, ids, size)?;
    let dims = with_size(g.dims(), dim, size);
    let len = check_allocation(op, &dims, g.dtype())?;
    let inner = inner_size(&dims, dim);
    // Every j, sorted by ids[j]. The sort is stable, so that equal ids stay in their order.
    let mut order: Vec<usize> = (0..indices.len()).collect();
    order.sort_by_key(|&j| indices[j]);
    let g = contiguous(g)?;
    dispatch_float!(g.dtype(), op, T => read_all(op, &[&g], |g| {
        let g = elements::<T>(g[0])?;
        let mut dx = vec![T::from_acc(Real::ZERO); len];
        if len > 0 && !indices.is_empty() {
            // The number of rows of `dx` that one thread takes at a time.
            let rows = rows_per_block(inner);
            par_chunks_mut(&mut dx, rows * inner, |piece, dx| {
                let mut sum = vec![<T as Elem>::Acc::ZERO; inner];
                let start = piece * rows;
                // The index in `order` of the first id that is not below the id of the current row.
                let mut next = order.partition_point(|&j| indices[j] < start % size);
                for (row, dx) in dx.chunks_mut(inner).enumerate() {
                    // This row is dx[o, id, ..].
                    let (o, id) = ((start + row) / size, (start + row) % size);
                    // The rows of the next o begin with the smallest id again.
                    if id == 0 {
                        next = 0;
                    }
                    let hits = order[next..].iter().take_while(|&&j| indices[j] == id).count();
                    for &j in &order[next..next + hits] {
                        let from = (o * indices.len() + j) * inner;
                        add(&mut sum, &g[from..from + inner]);
                    }
                    if hits > 0 {
                        write_and_clear(&mut sum, dx);
                    }
                    next += hits;
                }
            });
        }
        Ok(dx)
    })
    .map(|dx| from_vec(dx, dims.as_slice())))
}

/// Adds `row` to `sum`.
fn add<T: Elem>(sum: &mut [T::Acc], row: &[T]) {
    dispatch(
        #[inline(always)]
        || {
            for (s, x) in sum.iter_mut().zip(row) {
                *s += x.to_acc();
            }
        },
    );
}

/// Writes `sum`, rounded to the dtype, to `row`, and sets `sum` to zero.
fn write_and_clear<T: Elem>(sum: &mut [T::Acc], row: &mut [T]) {
    dispatch(
        #[inline(always)]
        || {
            for (s, x) in sum.iter_mut().zip(row) {
                *x = T::from_acc(*s);
                *s = Real::ZERO;
            }
        },
    );
}

/// Computes `y[o, j, i] = x[o, ids[o, j, i], i]`, with `count` elements along `dim` of the result.
pub fn gather(op: &'static str, x: &Raw, ids: &Raw, dim: usize, count: usize) -> Result<Raw> {
    let indices = checked_ids(op, ids, x.dims()[dim])?;
    if !is_float(x.dtype()) {
        return Ok(x.contiguous()?.gather(&ids.contiguous()?, dim)?);
    }
    let dims = with_size(x.dims(), dim, count);
    let len = check_allocation(op, &dims, x.dtype())?;
    let (size, inner) = (x.dims()[dim], inner_size(&dims, dim));
    let x = contiguous(x)?;
    dispatch_float!(x.dtype(), op, T => read_all(op, &[&x], |x| {
        let x = elements::<T>(x[0])?;
        let mut y = vec![T::from_acc(Real::ZERO); len];
        par_chunks_mut(&mut y, GRAIN, |piece, y| {
            let start = piece * GRAIN;
            // `at` is the index of (o, j, i) in the result, and of its id in `ids`.
            for (at, y) in (start..).zip(y) {
                let (o, i) = (at / (count * inner), at % inner);
                *y = x[(o * size + indices[at]) * inner + i];
            }
        });
        Ok(y)
    })
    .map(|y| from_vec(y, dims.as_slice())))
}

/// The gradient of [`gather`]: `dx[o, ids[o, j, i], i] += g[o, j, i]`, with `size` elements along `dim`.
pub fn gather_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    let indices = checked_ids(op, ids, size)?;
    let dims = with_size(g.dims(), dim, size);
    let len = check_allocation(op, &dims, g.dtype())?;
    let (count, inner) = (g.dims()[dim], inner_size(&dims, dim));
    let g = contiguous(g)?;
    dispatch_float!(g.dtype(), op, T => read_all(op, &[&g], |g| {
        let g = elements::<T>(g[0])?;
        let mut dx = vec![T::from_acc(Real::ZERO); len];
        if len > 0 && count > 0 {
            // A slab holds the elements of `dx` with the same o. One thread takes this many slabs at a time.
            let slabs = rows_per_block(size * inner);
            par_chunks_mut(&mut dx, slabs * size * inner, |piece, dx| {
                let mut sum = vec![<T as Elem>::Acc::ZERO; size * inner];
                for (slab, dx) in dx.chunks_mut(size * inner).enumerate() {
                    let start = (piece * slabs + slab) * count * inner;
                    let ids = &indices[start..start + count * inner];
                    // `at` is the index of (j, i) among the gradients with the same o, so `at % inner` is i.
                    // The loop ends with `ids`, which has only the ids of this o.
                    for ((at, g), &id) in g[start..].iter().enumerate().zip(ids) {
                        sum[id * inner + at % inner] += g.to_acc();
                    }
                    write_and_clear(&mut sum, dx);
                }
            });
        }
        Ok(dx)
    })
    .map(|dx| from_vec(dx, dims.as_slice())))
}
