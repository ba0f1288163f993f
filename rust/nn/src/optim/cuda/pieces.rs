//! Launches the CUDA kernels of elementwise optimizers, which update each element independently of the others. The
//! variables are cut into pieces (runs of consecutive elements). One block of threads updates a piece, or one warp if
//! the states are 8-bit.

use candle_core::DType;
use trainable_candle_core::cuda::Gpu;
use trainable_candle_core::cuda::launch::{Shape, count32, input, optional_output};
use trainable_candle_core::{Raw, Result};
use trainable_candle_cuda::kernels::optim::{AdamRounded, AdamStep};
use trainable_candle_cuda::kernels::optim_8bit::{Adam8bitRounded, Adam8bitStep};

use super::step::{Groups, Table};

/// The number of threads of a block.
const THREADS: u32 = 256;

/// Updates the variables of `table` with the kernel `<kernel>_step`, or `<kernel>_rounded` if the variables are rounded
/// stochastically. The kernel uses the coefficients that the last [`Groups::prepare`] of the variables' groups has
/// computed. With `zero_grads`, it also zeroes the gradients. `states` are f32 (bf16 if the variables are rounded
/// stochastically), or pairs of 8-bit codes (u8) and scales (f32).
///
/// # Errors
/// [`Error::Device`](trainable_candle_core::Error::Device) if the states are not on a CUDA device, or there is no such
/// kernel; [`Error::Argument`](trainable_candle_core::Error::Argument) if there are too many pieces.
pub fn step(
    op: &'static str,
    kernel: &'static str,
    states: &[Raw],
    table: &Table,
    groups: &Groups,
    zero_grads: bool,
) -> Result<()> {
    let gpu = Gpu::of(op, &table.pieces)?;
    // All elementwise kernels take the arguments of Adam's kernels. `table.known` describes the table's variables. The
    // group indices in the table are relative to its `first_group`, so coefficients and settings are passed from this
    // group on. Several pieces are parts of one segment: the start of a piece counts elements from the segment's
    // addresses of parameters and gradients.
    let (pieces, segments) = (input(op, &table.pieces)?, input(op, &table.segments)?);
    let coefficients = groups.coefficients_from(op, usize::from(table.known.first_group))?;
    let zero_grads = u32::from(zero_grads);
    // Null for a state that the optimizer does not have.
    let state = |index: usize| optional_output(op, states.get(index));
    // Only variables that are rounded stochastically have `firsts`: the kernel draws the random bits of an element by
    // the element's number, and `firsts` has the number of each piece's first element, in units of `STATE_BLOCK`.
    if let Some(firsts) = &table.firsts {
        let (settings, firsts) = (groups.settings_from(op, usize::from(table.known.first_group))?, input(op, firsts)?);
        // SAFETY: there are coefficients and settings for all groups of the table, and states for all its pieces.
        return unsafe {
            if states.first().is_some_and(|state| state.dtype() == DType::U8) {
                let (codes1, scales1, codes2, scales2) = (state(0)?, state(1)?, state(2)?, state(3)?);
                let count = count32(op, table.count)?;
                let arguments = Adam8bitRounded {
                    pieces,
                    count,
                    segments,
                    coefficients,
                    settings,
                    firsts,
                    zero_grads,
                    codes1,
                    scales1,
                    codes2,
                    scales2,
                };
                let shape = shape_8bit(op, gpu, table.count)?;
                gpu.named(kernel, "_rounded", table.known.dtypes)?.launch(op, gpu, shape, arguments)
            } else {
                let (state1, state2, state3) = (state(0)?, state(1)?, state(2)?);
                let arguments = AdamRounded {
                    pieces,
                    segments,
                    coefficients,
                    settings,
                    firsts,
                    zero_grads,
                    state1,
                    state2,
                    state3,
                };
                let shape = Shape::linear(op, table.count, THREADS)?;
                gpu.named(kernel, "_rounded", table.known.dtypes)?.launch(op, gpu, shape, arguments)
            }
        };
    }
    // SAFETY: there are coefficients for all groups of the table, and states for all its pieces.
    unsafe {
        if states.first().is_some_and(|state| state.dtype() == DType::U8) {
            let (codes1, scales1, codes2, scales2) = (state(0)?, state(1)?, state(2)?, state(3)?);
            let count = count32(op, table.count)?;
            let arguments =
                Adam8bitStep { pieces, count, segments, coefficients, zero_grads, codes1, scales1, codes2, scales2 };
            let shape = shape_8bit(op, gpu, table.count)?;
            gpu.named(kernel, "_step", table.known.dtypes)?.launch(op, gpu, shape, arguments)
        } else {
            let (state1, state2, state3) = (state(0)?, state(1)?, state(2)?);
            let arguments = AdamStep { pieces, segments, coefficients, zero_grads, state1, state2, state3 };
            let shape = Shape::linear(op, table.count, THREADS)?;
            gpu.named(kernel, "_step", table.known.dtypes)?.launch(op, gpu, shape, arguments)
        }
    }
}

/// Returns the shape of a launch over `pieces` pieces with 8-bit states. The launch has at most as many blocks of
/// threads as the device runs at a time. The warps of these blocks take the pieces in turn.
fn shape_8bit(op: &'static str, gpu: &Gpu, pieces: usize) -> Result<Shape> {
    /// The number of blocks that a multiprocessor runs at a time (`BLOCKS` in `cuda/kernels/optim_8bit.cu`).
    const BLOCKS: usize = 3;
    /// The number of warps (of 32 threads) of a block.
    const WARPS: usize = THREADS as usize / 32;
    Shape::linear(op, pieces.div_ceil(WARPS).min(BLOCKS * gpu.multiprocessors()), THREADS)
}
