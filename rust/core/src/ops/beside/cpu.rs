//! The CPU form, from elementwise functions.

use super::{Activation, Columns};
use crate::cpu::Mul;
use crate::ops::activation::{GeluTanh, Silu};
use crate::raw::Raw;
use crate::tape::BackwardContext;
use crate::{Result, compute};

/// The two inputs of SwiGLU: the gate in the first half of the columns `x`, and the features h in the second half.
fn halves(columns: &Columns, x: &Raw) -> Result<[Raw; 2]> {
    let Columns { dim, width, .. } = *columns;
    Ok([x.narrow(dim, 0, width)?, x.narrow(dim, width, width)?])
}

pub(super) fn forward(columns: &Columns, before: Option<&Raw>, x: &Raw) -> Result<Raw> {
    let x = columns.of(x)?;
    let y = match columns.activation {
        Activation::GeluTanh => compute::unary(&x, GeluTanh)?,
        Activation::SwiGlu => {
            let [gate, h] = halves(columns, &x)?;
            compute::binary(&compute::unary(&gate, Silu)?, &h, Mul)?
        }
    };
    match before {
        Some(before) => compute::cat(&[before, &y], columns.dim),
        None => Ok(y),
    }
}

/// Adds the gradient of x to the context, from `grad`, the gradient of the activation's result.
pub(super) fn backward(columns: &Columns, context: &mut BackwardContext<'_>, x: &Raw, grad: &Raw) -> Result<()> {
    let part = columns.of(x)?;
    let dx = match columns.activation {
        Activation::GeluTanh => compute::binary(grad, &part, GeluTanh)?,
        Activation::SwiGlu => {
            let [gate, h] = halves(columns, &part)?;
            let to_gate = compute::binary(&compute::binary(grad, &h, Mul)?, &gate, Silu)?;
            let to_h = compute::binary(grad, &compute::unary(&gate, Silu)?, Mul)?;
            compute::cat(&[&to_gate, &to_h], columns.dim)?
        }
    };
    context.add_part(0, x.dims(), columns.dim, columns.start, &dx)
}
