//! Dequantization of matrices on CUDA, by `kernels/dequantize.cu`. A matrix consists of parts; each part has
//! neighbouring rows, which were quantized together.

use candle_core::DType;
use trainable_candle_cuda::kernels::dequantize::{DEQUANTIZE, Dequantize};
use trainable_candle_cuda::structs::{QuantizedPart, QuantizedParts};

use super::{Part, Quantized, Scales};
use crate::cuda::Gpu;
use crate::cuda::launch::{Shape, address, count32, empty, output, suffix};
use crate::{Raw, Result};

const OP: &str = "dequantize";
/// The maximum number of parts that one launch dequantizes.
const MOST_PARTS: usize = 8;
/// Number of elements that a thread block processes in one iteration of its loop: each of 256 threads has four chunks
/// of eight elements.
const ELEMENTS_PER_ITERATION: usize = 256 * 4 * 8;
/// The maximum number of thread blocks for each multiprocessor and part.
const BLOCKS: usize = 8;

/// All values of the matrix in `dtype`, (rows, columns).
pub(super) fn values(matrix: &Quantized, dtype: DType) -> Result<Raw> {
    let gpu = Gpu::of(OP, &matrix.parts[0].codes)?;
    let out = empty(OP, gpu, &matrix.dims, dtype)?;
    let mut start = 0; // the number of elements in the parts before
    for parts in matrix.parts.chunks(MOST_PARTS) {
        let mut list = [QuantizedPart::default(); MOST_PARTS];
        for (part, description) in parts.iter().zip(&mut list) {
            *description = described(part, matrix.dims[1], start)?;
            start += description.count;
        }
        let largest = list.iter().map(|part| part.count as usize).max().unwrap_or(0);
        if largest == 0 {
            continue;
        }
        let blocks = largest.div_ceil(ELEMENTS_PER_ITERATION).min(BLOCKS * gpu.multiprocessors());
        let shape = Shape { grid: [blocks as u32, parts.len() as u32, 1], block: [256, 1, 1], shared: 0 };
        let arguments = Dequantize { parts: QuantizedParts { list }, out: output(OP, &out)? };
        // SAFETY: codes and scales have the sizes of their parts, and the result those of the matrix.
        unsafe { gpu.function(&DEQUANTIZE, suffix(OP, dtype)?)?.launch(OP, gpu, shape, arguments) }?;
    }
    Ok(out)
}

/// The kernel's number for the first format of [`Ggml::ALL`](super::Ggml::ALL).
const FIRST_GGML: u32 = 4;

/// The kernel's description of a part whose first element is element number `start` of the matrix.
fn described(part: &Part, columns: usize, start: u64) -> Result<QuantizedPart> {
    // `format` is the number of the format in the kernel's `Format`. For nested scales (of NF4), `inner` has the codes
    // of the scales, and `scales` and `offset` turn these codes into the scales.
    let (format, scales, inner, offset) = match &part.scales {
        Scales::Int8(scales) => (0, Some(scales), None, 0.0),
        Scales::Fp8(scales) => (1, Some(scales), None, 0.0),
        Scales::Nf4(scales) => (2, Some(scales), None, 0.0),
        Scales::Nested { codes, scales, offset } => (3, Some(scales), Some(codes), *offset),
        // The variants of `Ggml` are declared in the kernel's order.
        Scales::Ggml(format) => (FIRST_GGML + *format as u32, None, None, 0.0),
    };
    // The address, or 0 (null) for None.
    let optional = |raw: Option<&Raw>| raw.map_or(Ok(0), |raw| address(OP, raw));
    Ok(QuantizedPart {
        codes: address(OP, &part.codes)?,
        scales: optional(scales)?,
        inner: optional(inner)?,
        start,
        count: (part.rows * columns) as u64,
        columns: count32(OP, columns)?,
        format,
        scale_count: count32(OP, scales.map_or(0, Raw::elem_count))?,
        offset,
    })
}
