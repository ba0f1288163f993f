//! The CPU form of gated linear units, such as GEGLU: `h · function(gate)`, where a row of the input has `width`
//! elements of h and then `width` elements of the gate.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::elementwise::Pointwise;
use super::super::rows;
use crate::compute::contiguous;
use crate::cpu::{Binary, Elem, Unary, dispatch, elements, read_all};
use crate::raw::{Raw, from_vec};
use crate::{Result, dispatch_float};

/// Computes the gated linear unit with the activation `function`: `x (..., 2 width)` → `(..., width)`.
pub fn forward<F: Pointwise>(op: &'static str, x: &Raw, width: usize, function: F) -> Result<Raw> {
    let x = contiguous(x)?;
    let mut dims = x.dims().to_vec();
    *dims.last_mut().expect("the input has a last dimension") = width;
    dispatch_float!(x.dtype(), op, T => read_all(op, &[&x], |operands| {
        let x = elements::<T>(operands[0])?;
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let x = &x[2 * range.start * width..2 * range.end * width];
            let row_pairs = x.chunks_exact(2 * width).zip(out.chunks_exact_mut(width));
            dispatch(
                #[inline(always)]
                || {
                    for (x, out) in row_pairs {
                        let (h, gate) = x.split_at(width);
                        for (o, (h, gate)) in out.iter_mut().zip(h.iter().zip(gate)) {
                            let value: <T as Elem>::Acc = Unary::apply(&function, gate.to_acc());
                            o.write(T::from_acc(h.to_acc() * value));
                        }
                    }
                },
            );
        };
        let row_count = dims[..dims.len() - 1].iter().product();
        // SAFETY: `write` writes every element of its rows.
        Ok(unsafe { rows::fill_rows(row_count, width, rows::rows_per_block(width), write) })
    })
    .map(|y| from_vec(y, dims.as_slice())))
}

/// Computes the gradient of the `x` of [`forward`] from `grad`, the gradient of its result.
pub fn backward<F: Pointwise>(op: &'static str, x: &Raw, grad: &Raw, width: usize, function: F) -> Result<Raw> {
    let shape = x.shape().clone();
    let row_count = shape.elem_count() / (2 * width).max(1);
    let (x, grad) = (contiguous(x)?, contiguous(grad)?);
    dispatch_float!(x.dtype(), op, T => read_all(op, &[&x, &grad], |operands| {
        let (x, g) = (elements::<T>(operands[0])?, elements::<T>(operands[1])?);
        let write = |range: Range<usize>, out: &mut [MaybeUninit<T>]| {
            let x = &x[2 * range.start * width..2 * range.end * width];
            let g = &g[range.start * width..range.end * width];
            let row_triples = x.chunks_exact(2 * width).zip(g.chunks_exact(width)).zip(out.chunks_exact_mut(2 * width));
            dispatch(
                #[inline(always)]
                || {
                    for ((x, g), out) in row_triples {
                        let ((h, gate), (to_h, to_gate)) = (x.split_at(width), out.split_at_mut(width));
                        let outs = to_h.iter_mut().zip(to_gate);
                        for ((to_h, to_gate), (g, (h, gate))) in outs.zip(g.iter().zip(h.iter().zip(gate))) {
                            let (g, h, gate) = (g.to_acc(), h.to_acc(), gate.to_acc());
                            let value: <T as Elem>::Acc = Unary::apply(&function, gate);
                            to_h.write(T::from_acc(g * value));
                            // The binary form of `function` multiplies g h, the gradient of `value`, by the derivative.
                            to_gate.write(T::from_acc(Binary::apply(&function, g * h, gate)));
                        }
                    }
                },
            );
        };
        // SAFETY: `write` writes every element of its rows.
        Ok(unsafe { rows::fill_rows(row_count, 2 * width, rows::rows_per_block(width), write) })
    })
    .map(|grad_x| from_vec(grad_x, shape)))
}
