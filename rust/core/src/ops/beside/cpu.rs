//! The CPU form of [`activate_beside`](super::activate_beside), composed of elementwise functions. The result has the
//! columns of a tensor `before`, if there is one, and to the right of them an activation of the columns of x from
//! `columns.start` on.

use super::{Activation, Columns};
use crate::cpu::Mul;
use crate::ops::activation::{GeluTanh, Silu};
use crate::raw::Raw;
use crate::tape::BackwardContext;
use crate::{Result, compute};

/// Splits `read`, the columns that the activation reads, into the two inputs of SwiGLU = SiLU(gate) · h. The gate is the
/// first half and h the second. Each half has `width` columns, as many as the result of SwiGLU.
fn halves(columns: &Columns, read: &Raw) -> Result<[Raw; 2]> {
    let Columns { dim, width, .. } = *columns;
    Ok([read.narrow(dim, 0, width)?, read.narrow(dim, width, width)?])
}

pub(super) fn forward(columns: &Columns, before: Option<&Raw>, x: &Raw) -> Result<Raw> {
    let read = columns.of(x)?;
    let y = match columns.activation {
        Activation::GeluTanh => compute::unary(&read, GeluTanh)?,
        Activation::SwiGlu => {
            let [gate, h] = halves(columns, &read)?;
            compute::binary(&compute::unary(&gate, Silu)?, &h, Mul)?
        }
    };
    match before {
        Some(before) => compute::cat(&[before, &y], columns.dim),
        None => Ok(y),
    }
}

/// Adds to the context the gradient of `x`, computed from `grad`, the gradient of the activation's result. The caller
/// adds the gradient of `before`.
pub(super) fn backward(columns: &Columns, context: &mut BackwardContext<'_>, x: &Raw, grad: &Raw) -> Result<()> {
    let read = columns.of(x)?;
    // As a binary function, an activation takes a gradient and the activation's input. It multiplies the gradient by
    // the activation's derivative at this input.
    let dx = match columns.activation {
        Activation::GeluTanh => compute::binary(grad, &read, GeluTanh)?,
        Activation::SwiGlu => {
            let [gate, h] = halves(columns, &read)?;
            let grad_gate = compute::binary(&compute::binary(grad, &h, Mul)?, &gate, Silu)?;
            let grad_h = compute::binary(grad, &compute::unary(&gate, Silu)?, Mul)?;
            compute::cat(&[&grad_gate, &grad_h], columns.dim)?
        }
    };
    // x is input 0. The activation does not read its columns before `columns.start`, so it adds nothing to their gradient.
    context.add_part(0, x.dims(), columns.dim, columns.start, &dx)
}
