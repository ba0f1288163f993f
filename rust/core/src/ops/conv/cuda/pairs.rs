//! The forward pass of f32 convolutions, and of linear maps as convolutions, on tensor cores. Each f32 number becomes a
//! sum hi + lo of two bf16 numbers, and an operand with `c` channels becomes a bf16 operand with 3 `c` channels. The
//! convolution of such operands sums hi · hi, hi · lo and lo · hi, which together are nearly the f32 product. `conv.cu`
//! describes the layout.

use candle_core::DType;
use trainable_candle_cuda::kernels::conv::{PAIRS_LEFT, PAIRS_RIGHT, PairsLeft};

use super::{Sizes, run};
use crate::cuda::launch::{Kernel, Shape, count32, empty, input, output, suffix};
use crate::cuda::{Gpu, contiguous};
use crate::product::uses_pairs;
use crate::{Error, Raw, Result};

/// Number of bf16 numbers that are stored for an f32 number: hi, lo, and hi once more.
const PARTS: usize = 3;
/// Number of channels that a thread splits at a time, as `GROUP` in `cuda/include/conv/pairs.cuh`. Channels are padded
/// to a multiple of it. (The groups of a convolution are something else.)
const GROUP: usize = 8;

/// The kernel that splits the left factor (the image): each row becomes the hi of all channels, again their hi, then
/// their lo.
pub(in crate::ops) const LEFT: &Kernel<PairsLeft> = &PAIRS_LEFT;
/// The kernel that splits the right factor (the weight): each row becomes the hi of all channels, their lo, then again
/// their hi. Its arguments have the same types as those of the left kernel, so the two kernels share a structure of
/// arguments, `PairsLeft`.
pub(in crate::ops) const RIGHT: &Kernel<PairsLeft> = &PAIRS_RIGHT;

/// Splits a dense f32 operand with rows of `channels` numbers (the channels of a pixel of the image, or of a tap of
/// the weight) with the CUDA kernel `side` ([`LEFT`] or [`RIGHT`]). Returns bf16 numbers of shape (rows, 3 ·
/// channels), with `channels` rounded up to a multiple of 8.
pub(in crate::ops) fn pairs(op: &'static str, side: &Kernel<PairsLeft>, from: &Raw, channels: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, from)?;
    let (rows, padded) = (from.elem_count() / channels.max(1), channels.next_multiple_of(GROUP));
    let to = empty(op, gpu, &[rows, PARTS * padded], DType::BF16)?;
    let function = gpu.function(side, suffix(op, DType::F32)?)?;
    let groups_per_thread = 1;
    let shape = Shape::flat(rows * padded / GROUP, groups_per_thread);
    // The kernel computes 3 · `padded` in 32 bits, so this checks that the product fits.
    count32(op, PARTS * padded)?;
    let arguments = PairsLeft {
        to: output(op, &to)?,
        from: input(op, from)?,
        rows: rows as u64,
        channels: count32(op, channels)?,
        padded: count32(op, padded)?,
    };
    // SAFETY: the tensors are dense, of this many rows of these widths.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(to)
}

/// Splits the image and the weight of an f32 convolution. Returns the sizes of the bf16 convolution, and its image and
/// weight; `None` if the kernels for tensor cores do not support this convolution.
pub(super) fn operands(op: &'static str, sizes: Sizes, [x, weight]: [&Raw; 2]) -> Result<Option<(Sizes, [Raw; 2])>> {
    let channels = sizes.channels as usize;
    // The sizes of the bf16 convolution.
    let split = Sizes { channels: count32(op, PARTS * channels.next_multiple_of(GROUP))?, ..sizes };
    // The input channels are padded and the new tensors are aligned. So `fits` gets no numbers of channels and no
    // addresses to check; it checks only that `groups` is 1 and the window is small.
    let (no_channels, any_multiple, no_addresses) = (&[], 1, &[]);
    if channels == 0 || !split.fits(DType::BF16, no_channels, any_multiple, no_addresses) {
        return Ok(None);
    }
    Ok(Some((split, [pairs(op, LEFT, x, channels)?, pairs(op, RIGHT, weight, channels)?])))
}

/// Computes y (rows, n) = x (rows, k) times the transpose of `weight` (n, k), plus `bias` (n) in each row, as a
/// convolution of an image of height 1 with a pixel for each row of x. The caller has checked that both have the same
/// k. Returns `None` if `x` is empty or products are not computed [in pairs](crate::compute::with_bf16_pairs).
///
/// # Errors
/// [`Error::Shape`] if `x` or `weight` is not a matrix.
pub fn linear(op: &'static str, x: &Raw, weight: &Raw, bias: Option<&Raw>) -> Result<Option<Raw>> {
    let (&[rows, inner], &[out, _]) = (x.dims(), weight.dims()) else {
        return Err(Error::shape(
            op,
            format!("found shapes {:?} and {:?}, expected matrices", x.dims(), weight.dims()),
        ));
    };
    if !uses_pairs(x.dtype()) || x.elem_count() == 0 {
        return Ok(None);
    }
    let count = |size| count32(op, size);
    let sizes = Sizes {
        batch: 1,
        input: [1, count(rows)?],
        channels: count(inner)?,
        kernel: [1; 2],
        output: [1, count(rows)?],
        out_channels: count(out)?,
        stride: [1; 2],
        padding: [0; 2],
        dilation: [1; 2],
        groups: 1,
    };
    let (x, weight) = (contiguous(x)?, contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    // `run` splits the f32 operands by a call of `operands`.
    let y = run(op, sizes, [1, 1, rows, out], [&x, &weight], bias.as_ref())?;
    Ok(Some(y.reshape((rows, out))?))
}
