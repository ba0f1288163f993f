//! The CUDA form of rotary embeddings: `kernels/rope.cu`.

use trainable_candle_cuda::kernels::rope::{ROPE, Rope};

use crate::cuda::launch::{Shape, accumulator, count32, empty, input, output, rows_of, suffix, wide};
use crate::cuda::{Gpu, cast, contiguous};
use crate::{Raw, Result};

/// Rotates the pairs of features in each row of a dense `x (..., width)` by the angles of the row's position, or by the
/// negative angles if `back`. `cos` and `sin` are (positions, width / 2): one row per position and one column per pair.
/// Row r of `x` has the position (r / `repeats`) % positions. Pair i consists of the features 2i and 2i + 1 if
/// `interleaved`, else of the features i and i + width / 2.
pub fn rotate(
    op: &'static str,
    x: &Raw,
    [cos, sin]: [&Raw; 2],
    repeats: usize,
    interleaved: bool,
    back: bool,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let dense_table = |table: &Raw| contiguous(&cast(table, accumulator(x.dtype()))?);
    let (cos, sin) = (dense_table(cos)?, dense_table(sin)?);
    let y = empty(op, gpu, x.dims(), x.dtype())?;
    if y.elem_count() > 0 {
        let function = gpu.function(&ROPE, suffix(op, x.dtype())?)?;
        let (rows, width) = rows_of(&x);
        // In each iteration of its loop, a thread rotates `wide` pairs: as many as 16 bytes hold elements.
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
        // SAFETY: the tensors are dense and have the sizes in the arguments.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(y)
}
