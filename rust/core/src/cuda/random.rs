//! Random numbers drawn by kernels on a GPU. They equal, up to rounding, those that the CPU draws from the same state
//! of the generator.

use candle_core::{DType, Device};
use trainable_candle_cuda::kernels::random::{NORMAL, Normal, UNIFORM, Uniform};

use super::gpu::Gpu;
use super::launch::{Arguments, Const, Kernel, Mut, Shape, empty, output};
use super::recorder::generator;
use crate::rng::state::State;
use crate::{Raw, Result};

// In `uniform` and `normal`, the closure makes the kernel's arguments; [`draw`] says what the closure's parameters are.

/// A tensor of `low + (high - low) u` in f32, where u are the uniform numbers in [0, 1) that the generator draws from
/// its state `start` on.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if `device` is not a CUDA device, or the driver reports an error;
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the result does not fit.
pub fn uniform(device: &Device, dims: &[usize], start: State, [low, high]: [f64; 2]) -> Result<Raw> {
    draw("rand", &UNIFORM, device, dims, start, |y, n, address, State { seed, offset }| Uniform {
        y,
        n,
        state: address,
        seed,
        offset,
        low,
        high,
    })
}

/// A tensor of `mean + std z` in f32, where z are the standard normal numbers that the generator draws from its
/// state `start` on.
///
/// # Errors
/// As [`uniform`].
pub fn normal(device: &Device, dims: &[usize], start: State, [mean, std]: [f64; 2]) -> Result<Raw> {
    draw("randn", &NORMAL, device, dims, start, |y, n, address, State { seed, offset }| Normal {
        y,
        n,
        state: address,
        seed,
        offset,
        mean,
        std,
    })
}

/// Draws with a kernel. `arguments` makes the kernel's arguments from the result, the result's number of elements, and
/// the two values by which the kernel finds its seed and position: in a CUDA graph, the address of the generator's
/// state in device memory, and a state whose position is relative to that one; otherwise a null address, and `start`
/// (see [`generator`]).
fn draw<A: Arguments>(
    op: &'static str,
    kernel: &Kernel<A>,
    device: &Device,
    dims: &[usize],
    start: State,
    arguments: impl FnOnce(Mut, u64, Const, State) -> A,
) -> Result<Raw> {
    let gpu = Gpu::of_device(op, device)?;
    let y = empty(op, gpu, dims, DType::F32)?;
    let count = y.elem_count();
    if count > 0 {
        // The kernels have no variants for dtypes: they write f32.
        let function = gpu.function(kernel, &[])?;
        // Each thread draws four numbers.
        let shape = Shape::threads(op, count.div_ceil(4))?;
        // In a CUDA graph, the returned state is relative to the one at the address.
        let (address, start) = generator(start);
        let arguments = arguments(output(op, &y)?, count as u64, address, start);
        // SAFETY: the result has `count` elements.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
