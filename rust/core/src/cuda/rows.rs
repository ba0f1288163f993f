//! Operations that go over rows or single elements with kernels of their own: gated units, softmax, rope, dropout, resizing.

use trainable_candle_cuda::kernels::dropout::{DROPOUT, Dropout};
use trainable_candle_cuda::kernels::gated::{GegluBackward, GegluForward};
use trainable_candle_cuda::kernels::rope::{ROPE, Rope};
use trainable_candle_cuda::kernels::softmax::{SoftmaxBackward, SoftmaxForward};
use trainable_candle_cuda::kernels::upsample::{
    UPSAMPLE_NEAREST2D_BACKWARD, UPSAMPLE_NEAREST2D_FORWARD, UpsampleNearest2dBackward, UpsampleNearest2dForward,
};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::graph::generator;
use super::launch::{Shape, accumulator, count32, empty, input, output, suffix, wide};
use crate::rng::State;
use crate::{Raw, Result};

/// The last dimension, and how many rows of it there are.
fn rows_of(x: &Raw) -> (usize, usize) {
    let len = x.dims().last().copied().unwrap_or(1);
    (x.elem_count() / len.max(1), len)
}

/// A gated linear unit, that of the kernel `name`, of (..., 2 width).
pub fn gated(op: &'static str, name: &'static str, x: &Raw, width: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    let y = empty(op, gpu, &dims, x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.named(name, suffix(op, x.dtype())?)?;
        let (rows, width) = ((y.elem_count() / width) as u64, count32(op, width)?);
        let shape = Shape::flat(y.elem_count(), wide(x.dtype()));
        let arguments = GegluForward { x: input(op, &x)?, y: output(op, &y)?, rows, width };
        // SAFETY: both tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// The gradient of [`gated`] by the kernel `name`.
pub fn gated_backward(op: &'static str, name: &'static str, x: &Raw, grad: &Raw, width: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let (x, grad) = (contiguous(x)?, contiguous(grad)?);
    let dx = empty(op, gpu, x.dims(), x.dtype())?;
    if dx.elem_count() > 0 {
        let function = gpu.named(name, suffix(op, x.dtype())?)?;
        let (rows, width) = ((grad.elem_count() / width) as u64, count32(op, width)?);
        let shape = Shape::flat(grad.elem_count(), wide(x.dtype()));
        let (x, grad) = (input(op, &x)?, input(op, &grad)?);
        let arguments = GegluBackward { x, grad, dx: output(op, &dx)?, rows, width };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(dx)
}

/// A softmax, that of the kernel `name`, over the last dimension of a dense tensor.
pub fn softmax(op: &'static str, name: &'static str, x: &Raw) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.named(name, suffix(op, x.dtype())?)?;
        let (rows, len) = rows_of(x);
        let shape = Shape::rows(rows, len, x.dtype());
        let (rows, len) = (rows as u64, count32(op, len)?);
        let arguments = SoftmaxForward { x: input(op, x)?, y: output(op, &y)?, rows, len };
        // SAFETY: both tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// The gradient of [`softmax`] from its result by the kernel `name`, over the last dimension of dense tensors.
pub fn softmax_backward(op: &'static str, name: &'static str, y: &Raw, grad: &Raw) -> Result<Raw> {
    let gpu = Gpu::of(op, y)?;
    let dx = empty(op, gpu, y.dims(), y.dtype())?;
    if dx.elem_count() > 0 {
        let function = gpu.named(name, suffix(op, y.dtype())?)?;
        let (rows, len) = rows_of(y);
        let shape = Shape::rows(rows, len, y.dtype());
        let (rows, len) = (rows as u64, count32(op, len)?);
        let (y, grad) = (input(op, y)?, input(op, grad)?);
        let arguments = SoftmaxBackward { y, grad, dx: output(op, &dx)?, rows, len };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(dx)
}

/// Rows turned by the angles of their positions; `repeats` rows in turn share one. `back` turns the other way.
pub fn rope(
    op: &'static str,
    x: &Raw,
    [cos, sin]: [&Raw; 2],
    repeats: usize,
    interleaved: bool,
    back: bool,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let numbers = |table: &Raw| contiguous(&cast(table, accumulator(x.dtype()))?);
    let (cos, sin) = (numbers(cos)?, numbers(sin)?);
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&ROPE, suffix(op, x.dtype())?)?;
        let (rows, width) = rows_of(&x);
        let shape = Shape::flat(y.elem_count(), 2 * wide(x.dtype()));
        let arguments = Rope {
            x: input(op, &x)?,
            cos: input(op, &cos)?,
            sin: input(op, &sin)?,
            y: output(op, &y)?,
            rows: rows as u64,
            positions: count32(op, cos.dims()[0])?,
            repeats: count32(op, repeats)?,
            width: count32(op, width)?,
            interleaved: u32::from(interleaved),
            back: u32::from(back),
        };
        // SAFETY: the tensors are dense and of these sizes.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// Zeros where the generator's words from `state` on lie below `threshold`, else the element times `kept`.
pub fn dropout(op: &'static str, x: &Raw, state: State, threshold: u32, kept: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&DROPOUT, suffix(op, x.dtype())?)?;
        let shape = Shape::flat(y.elem_count(), 4 * wide(x.dtype()));
        let (state, State { seed, offset }) = generator(state);
        let (x, len) = (input(op, &x)?, y.elem_count() as u64);
        let arguments = Dropout { x, y: output(op, &y)?, state, seed, offset, len, threshold, kept };
        // SAFETY: both tensors are dense and of this length.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}

/// Images (batch, height, width, channels) resized by the nearest pixel, or the gradient of that; sizes are (height, width).
pub fn upsample(
    op: &'static str,
    x: &Raw,
    [batch, channels]: [usize; 2],
    [from, to]: [[usize; 2]; 2],
    is_backward: bool,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let result = if is_backward { from } else { to };
    let y = empty(op, gpu, &[batch, result[0], result[1], channels], x.dtype())?;
    if y.elem_count() > 0 {
        let (lines, line) = (batch * result[0], result[1] * channels);
        let blocks = lines * line.div_ceil(1024 * wide(x.dtype()));
        let shape = Shape { grid: [blocks.clamp(1, i32::MAX as usize) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
        let (batch, dtypes) = (batch as u64, suffix(op, x.dtype())?);
        let [height, width] = [count32(op, from[0])?, count32(op, from[1])?];
        let [out_height, out_width, channels] = [count32(op, to[0])?, count32(op, to[1])?, count32(op, channels)?];
        let (x, y) = (input(op, &x)?, output(op, &y)?);
        // SAFETY: the images are dense and of these sizes.
        unsafe {
            if is_backward {
                let arguments =
                    UpsampleNearest2dBackward { grad: x, dx: y, batch, height, width, out_height, out_width, channels };
                gpu.function(&UPSAMPLE_NEAREST2D_BACKWARD, dtypes)?.launch(op, gpu, shape, arguments)
            } else {
                let arguments =
                    UpsampleNearest2dForward { x, y, batch, height, width, out_height, out_width, channels };
                gpu.function(&UPSAMPLE_NEAREST2D_FORWARD, dtypes)?.launch(op, gpu, shape, arguments)
            }
        }?;
    }
    Ok(y)
}
