//! The CUDA form of dropout: `kernels/dropout.cu`.

use trainable_candle_cuda::kernels::dropout::{DROPOUT, Dropout};

use crate::cuda::launch::{Shape, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous, generator};
use crate::rng::State;
use crate::{Raw, Result};

/// Returns `x` with 0 for each element whose random word is below `threshold`, and the other elements multiplied by
/// `scale`. The words are those that the generator draws from `state` on.
pub fn apply(op: &'static str, x: &Raw, state: State, threshold: u32, scale: f64) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&DROPOUT, suffix(op, x.dtype())?)?;
        // The kernel takes elements in groups of 64. A thread computes `wide` neighbouring elements in each quarter of
        // a group.
        let shape = Shape::flat(y.elem_count(), 4 * wide(x.dtype()));
        // Usually the address is null, and seed and offset are those of `state`. But if a CUDA graph is recorded and
        // `state` is of the generator that the graph draws from, `offset` is relative to the state at the address,
        // which each replay advances.
        let (state_address, State { seed, offset }) = generator(state);
        let (x, len) = (input(op, &x)?, y.elem_count() as u64);
        let y_output = output(op, &y)?;
        let arguments = Dropout { x, y: y_output, state: state_address, seed, offset, len, threshold, scale };
        // SAFETY: both tensors are dense and of this length.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
