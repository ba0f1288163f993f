//! The CUDA form of `activate_beside`, which launches `kernels/beside.cu`. The result has the columns of `before` and,
//! to the right of them, an activation of columns of `x`.

use trainable_candle_cuda::kernels::beside::{GeluTanhBesideBackward, GeluTanhBesideForward};

use super::Columns;
use crate::cuda::launch::{Shape, count32, empty, input, optional_input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous};
use crate::raw::Raw;
use crate::tape::BackwardContext;
use crate::{Result, compute};

/// Computes the result. `columns` says which columns of `x` the activation reads (`len()` columns, from `start` on),
/// and how many it returns (`width`). Columns are the indices of the last dimension, `dim`.
pub(super) fn forward(columns: &Columns, before: Option<&Raw>, x: &Raw) -> Result<Raw> {
    let op = columns.activation.info().name;
    let gpu = Gpu::of(op, x)?;
    let (x, before) = (contiguous(x)?, before.map(contiguous).transpose()?);
    let y = empty(op, gpu, &columns.result(x.dims()), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.named(op, "_forward", suffix(op, x.dtype())?)?;
        // `wide` is the number of elements in 16 bytes, about as many as each thread computes.
        let shape = Shape::flat(y.elem_count(), wide(x.dtype()));
        // The kernels for SwiGLU have the same parameters as those for GELU.
        let arguments = GeluTanhBesideForward {
            before: optional_input(op, before.as_ref())?,
            x: input(op, &columns.of(&x)?)?,
            y: output(op, &y)?,
            rows: (y.elem_count() / (columns.before_width + columns.width)) as u64,
            x_row: x.dims()[columns.dim] as u64,
            before_width: count32(op, columns.before_width)?,
            width: count32(op, columns.width)?,
        };
        // SAFETY: the tensors are dense, except for the view of `x`, whose rows are `x_row` elements apart. All have
        // the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// Adds to the context the gradient of `x`, computed from `grad`, the gradient of the activation's result. The kernel
/// writes straight into the gradient of `x` if none of the columns that the activation reads has a gradient yet.
pub(super) fn backward(columns: &Columns, context: &mut BackwardContext<'_>, x: &Raw, grad: &Raw) -> Result<()> {
    const X: usize = 0; // the index of x among the operation's inputs
    let Columns { dim, start, .. } = *columns;
    let (x, grad) = (contiguous(x)?, even_rows(grad)?);
    // `part` returns a view of the gradient of `x` at these columns, or `None` if the view cannot be written directly.
    // In the pair, `&x` gives the gradient's dtype and device, and `x.dims()` its shape.
    if let Some(part_of_grad) = context.part(X, (&x, x.dims()), dim, start..start + columns.len())? {
        return write(columns, &x, &grad, &part_of_grad);
    }
    let mut dims = x.dims().to_vec();
    dims[dim] = columns.len();
    let dx = compute::unset(columns.activation.info().name, &x, &dims)?;
    write(columns, &x, &grad, &dx)?;
    context.add_part(X, x.dims(), dim, start, &dx)
}

/// Writes to `dx` the gradient of those columns of `x` that the activation reads. `dx` has only these columns.
fn write(columns: &Columns, x: &Raw, grad: &Raw, dx: &Raw) -> Result<()> {
    let op = columns.activation.info().name;
    let gpu = Gpu::of(op, x)?;
    if grad.elem_count() == 0 {
        return Ok(());
    }
    let function = gpu.named(op, "_backward", suffix(op, x.dtype())?)?;
    // The kernels for SwiGLU have the same parameters as those for GELU.
    let arguments = GeluTanhBesideBackward {
        x: input(op, &columns.of(x)?)?,
        grad: input(op, grad)?,
        dx: output(op, dx)?,
        rows: (grad.elem_count() / columns.width) as u64,
        x_row: x.dims()[columns.dim] as u64,
        grad_row: row_stride(grad),
        dx_row: row_stride(dx),
        width: count32(op, columns.width)?,
    };
    // SAFETY: the rows are dense and evenly spaced, and have the sizes in the arguments.
    unsafe { function.launch(op, gpu, Shape::flat(grad.elem_count(), wide(x.dtype())), arguments) }
}

/// The distance in elements between neighbouring rows of `x`, which must be evenly spaced.
fn row_stride(x: &Raw) -> u64 {
    let rank = x.rank();
    // The stride of a dimension of size 1 has no meaning. If all sizes are 1, there is one row, and any value is right.
    let innermost = (0..rank - 1).rev().find(|&i| x.dims()[i] != 1);
    innermost.map_or(x.dims()[rank - 1], |i| x.stride()[i]) as u64
}

/// `x` itself if its rows are dense and evenly spaced; otherwise a dense copy.
fn even_rows(x: &Raw) -> Result<Raw> {
    let (dims, strides) = (x.dims(), x.stride());
    let last = x.rank() - 1;
    let outer: Vec<usize> = (0..last).filter(|&i| dims[i] != 1).collect();
    let is_even = (dims[last] == 1 || strides[last] == 1)
        && outer.windows(2).all(|pair| strides[pair[0]] == strides[pair[1]] * dims[pair[1]]);
    if is_even { Ok(x.clone()) } else { contiguous(x) }
}
