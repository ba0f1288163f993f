//! Random numbers, the same ones as on the CPU up to rounding.

use candle_core::{DType, Device};
use trainable_candle_cuda::modules::RANDOM;

use super::gpu::Gpu;
use super::graph::generator;
use super::launch::{Shape, address, empty, launch};
use crate::rng::State;
use crate::{Raw, Result};

/// `low + (high - low) u` in f32, where u is what the generator draws from `start` on.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if they do not fit.
pub fn uniform(device: &Device, dims: &[usize], start: State, [low, high]: [f64; 2]) -> Result<Raw> {
    draw("rand", "uniform", device, dims, start, [low, high])
}

/// `mean + std z` in f32, where z is what the generator draws from `start` on.
///
/// # Errors
/// As [`uniform`].
pub fn normal(device: &Device, dims: &[usize], start: State, [mean, std]: [f64; 2]) -> Result<Raw> {
    draw("randn", "normal", device, dims, start, [mean, std])
}

fn draw(
    op: &'static str,
    name: &'static str,
    device: &Device,
    dims: &[usize],
    start: State,
    [a, b]: [f64; 2],
) -> Result<Raw> {
    let gpu = Gpu::of_device(op, device)?;
    let y = empty(op, gpu, dims, DType::F32)?;
    let count = y.elem_count();
    if count > 0 {
        let function = gpu.function(&RANDOM, name, &[])?;
        let shape = Shape::threads(op, count.div_ceil(4))?;
        let (to, count) = (address(op, &y)?, count as u64);
        let (state, start) = generator(start);
        // SAFETY: the kernel takes the result, its length, the generator's place and two numbers.
        unsafe { launch!(op, gpu, function, shape, to, count, state, start.seed, start.offset, a, b) }?;
    }
    Ok(y)
}
