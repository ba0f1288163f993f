//! Operations that go over rows or single elements with kernels of their own: gated units, softmax, rope, dropout, resizing.

use trainable_candle_cuda::modules::{DROPOUT, GATED, Module, ROPE, SOFTMAX, UPSAMPLE};

use super::copy::{cast, contiguous};
use super::gpu::Gpu;
use super::graph::generator;
use super::launch::{Shape, accumulator, address, count32, empty, launch, suffix, wide};
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
        let function = gpu.function(&GATED, name, suffix(op, x.dtype())?)?;
        let (rows, width) = ((y.elem_count() / width) as u64, count32(op, width)?);
        let shape = Shape::flat(y.elem_count(), wide(x.dtype()));
        let (from, to) = (address(op, &x)?, address(op, &y)?);
        // SAFETY: the kernel takes the input, the result and their sizes.
        unsafe { launch!(op, gpu, function, shape, from, to, rows, width) }?;
    }
    Ok(y)
}

/// The gradient of [`gated`] by the kernel `name`.
pub fn gated_backward(op: &'static str, name: &'static str, x: &Raw, grad: &Raw, width: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let (x, grad) = (contiguous(x)?, contiguous(grad)?);
    let dx = empty(op, gpu, x.dims(), x.dtype())?;
    if dx.elem_count() > 0 {
        let function = gpu.function(&GATED, name, suffix(op, x.dtype())?)?;
        let (rows, width) = ((grad.elem_count() / width) as u64, count32(op, width)?);
        let shape = Shape::flat(grad.elem_count(), wide(x.dtype()));
        let (from, g, to) = (address(op, &x)?, address(op, &grad)?, address(op, &dx)?);
        // SAFETY: the kernel takes the input, the gradient, the result and their sizes.
        unsafe { launch!(op, gpu, function, shape, from, g, to, rows, width) }?;
    }
    Ok(dx)
}

/// A softmax, that of the kernel `name`, over the last dimension of a dense tensor.
pub fn softmax(op: &'static str, name: &'static str, x: &Raw) -> Result<Raw> {
    over_rows(op, &SOFTMAX, name, [x])
}

/// The gradient of [`softmax`] from its result by the kernel `name`, over the last dimension of dense tensors.
pub fn softmax_backward(op: &'static str, name: &'static str, y: &Raw, grad: &Raw) -> Result<Raw> {
    over_rows(op, &SOFTMAX, name, [y, grad])
}

/// A kernel of (operands, result, rows, len) over rows.
fn over_rows<const N: usize>(
    op: &'static str,
    module: &'static Module,
    name: &'static str,
    operands: [&Raw; N],
) -> Result<Raw> {
    let x = operands[0];
    let gpu = Gpu::of(op, x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(module, name, suffix(op, x.dtype())?)?;
        let (rows, len) = rows_of(x);
        let shape = Shape::rows(rows, len, x.dtype());
        let (first, to, rows, len) = (address(op, x)?, address(op, &y)?, rows as u64, count32(op, len)?);
        // SAFETY: the kernel takes the operands, the result, all dense and of one shape, and their sizes.
        unsafe {
            match operands.get(1) {
                Some(second) => launch!(op, gpu, function, shape, first, address(op, second)?, to, rows, len),
                None => launch!(op, gpu, function, shape, first, to, rows, len),
            }
        }?;
    }
    Ok(y)
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
        let function = gpu.function(&ROPE, "rope", suffix(op, x.dtype())?)?;
        let (rows, width) = rows_of(&x);
        let shape = Shape::flat(y.elem_count(), 2 * wide(x.dtype()));
        let (rows, positions, repeats, width) =
            (rows as u64, count32(op, cos.dims()[0])?, count32(op, repeats)?, count32(op, width)?);
        let addresses = [address(op, &x)?, address(op, &cos)?, address(op, &sin)?, address(op, &y)?];
        let [from, cos, sin, to] = addresses;
        let (interleaved, back) = (u32::from(interleaved), u32::from(back));
        // SAFETY: the kernel takes the input, the tables, the result, their sizes and two switches.
        unsafe {
            launch!(op, gpu, function, shape, from, cos, sin, to, rows, positions, repeats, width, interleaved, back)
        }?;
    }
    Ok(y)
}

/// Zeros where the generator's words from `state` on lie below `threshold`, else the element times `kept`.
pub fn dropout(op: &'static str, x: &Raw, state: State, threshold: u32, kept: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&DROPOUT, "dropout", suffix(op, x.dtype())?)?;
        let shape = Shape::flat(y.elem_count(), 4 * wide(x.dtype()));
        let (from, to, len) = (address(op, &x)?, address(op, &y)?, y.elem_count() as u64);
        let (memory, state) = generator(state);
        // SAFETY: the kernel takes the input, the result, the generator's place, in memory or by value, the length and two numbers.
        unsafe { launch!(op, gpu, function, shape, from, to, memory, state.seed, state.offset, len, threshold, kept) }?;
    }
    Ok(y)
}

/// Images (batch, height, width, channels) resized by the nearest pixel, or the gradient of that; sizes are (height, width).
pub fn upsample(
    op: &'static str,
    x: &Raw,
    [batch, channels]: [usize; 2],
    [input, output]: [[usize; 2]; 2],
    is_backward: bool,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let (name, result) =
        if is_backward { ("upsample_nearest2d_backward", input) } else { ("upsample_nearest2d_forward", output) };
    let y = empty(op, gpu, &[batch, result[0], result[1], channels], x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&UPSAMPLE, name, suffix(op, x.dtype())?)?;
        let (lines, line) = (batch * result[0], result[1] * channels);
        let blocks = lines * line.div_ceil(1024 * wide(x.dtype()));
        let shape = Shape { grid: [blocks.clamp(1, i32::MAX as usize) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
        let (from, to, batch) = (address(op, &x)?, address(op, &y)?, batch as u64);
        let [height, width] = [count32(op, input[0])?, count32(op, input[1])?];
        let [out_height, out_width, channels] =
            [count32(op, output[0])?, count32(op, output[1])?, count32(op, channels)?];
        // SAFETY: the kernel takes the images, the result and their sizes.
        unsafe { launch!(op, gpu, function, shape, from, to, batch, height, width, out_height, out_width, channels) }?;
    }
    Ok(y)
}
