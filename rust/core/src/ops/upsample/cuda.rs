//! The CUDA form of nearest-neighbour resizing: `kernels/upsample.cu`.

use trainable_candle_cuda::kernels::upsample::{
    UPSAMPLE_NEAREST2D_BACKWARD, UPSAMPLE_NEAREST2D_FORWARD, UpsampleNearest2dBackward, UpsampleNearest2dForward,
};

use super::{Resize, UPSAMPLE_NEAREST2D};
use crate::cuda::launch::{Shape, count32, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous};
use crate::{Raw, Result};

/// Resizes the images `x`. If `is_backward`, `x` is the gradient of the result, and the function returns the gradient
/// of the images.
pub(super) fn resize(size: &Resize, x: &Raw, is_backward: bool) -> Result<Raw> {
    let op = UPSAMPLE_NEAREST2D.name;
    let &Resize { batch, channels, input: from, output: to } = size;
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let [y_height, y_width] = if is_backward { from } else { to };
    let y = empty(op, gpu, &[batch, y_height, y_width, channels], x.dtype())?;
    if y.elem_count() > 0 {
        // A line is a row of pixels of y. A block of 256 threads writes a piece of a line: each thread writes four
        // packs of 16 bytes, with `wide` elements each. If there are more pieces than blocks in the largest grid,
        // blocks write several pieces. They also do so if the kernel writes packs of one element, as pieces are then
        // smaller.
        let (lines, line_len) = (batch * y_height, y_width * channels);
        let blocks = lines * line_len.div_ceil(256 * 4 * wide(x.dtype()));
        let shape = Shape { grid: [blocks.clamp(1, i32::MAX as usize) as u32, 1, 1], block: [256, 1, 1], shared: 0 };
        let (batch, dtype_suffix) = (batch as u64, suffix(op, x.dtype())?);
        let [height, width] = [count32(op, from[0])?, count32(op, from[1])?];
        let [out_height, out_width, channels] = [count32(op, to[0])?, count32(op, to[1])?, count32(op, channels)?];
        let (x, y) = (input(op, &x)?, output(op, &y)?);
        // SAFETY: the images are dense and have the sizes in the arguments.
        unsafe {
            if is_backward {
                let arguments =
                    UpsampleNearest2dBackward { grad: x, dx: y, batch, height, width, out_height, out_width, channels };
                gpu.function(&UPSAMPLE_NEAREST2D_BACKWARD, dtype_suffix)?.launch(op, gpu, shape, arguments)
            } else {
                let arguments =
                    UpsampleNearest2dForward { x, y, batch, height, width, out_height, out_width, channels };
                gpu.function(&UPSAMPLE_NEAREST2D_FORWARD, dtype_suffix)?.launch(op, gpu, shape, arguments)
            }
        }?;
    }
    Ok(y)
}
