//! W8A8 products (8-bit codes of the input times 8-bit codes of the weights) of e4m3 codes by cuBLASLt, on compute
//! capability 9.0. cuBLASLt multiplies the sums by the scales of the codes before it writes them.

use candle_core::DType;

use super::{Addends, OP, Rounded};
use crate::cuda::launch::address;
use crate::cuda::{Codes, Gpu, Scaled, scaled_product_of_codes};
use crate::quantized::{Part, Quantized};
use crate::{Raw, Result, compute};

/// cuBLASLt expects the addresses of vectors of scales to be multiples of this many bytes.
const ALIGNMENT: u64 = 16;

/// The largest number of products in a sum that cuBLASLt may compute with fewer bits than f32 has ("fast
/// accumulation").
///
/// Sums of this many products with random signs then have a relative error of 7e-4. That is little beside the errors
/// from rounding the factors to e4m3 (4e-2) and the sums to bf16 (1e-3). Tensor cores truncate, so sums of products
/// with equal signs are too small: sums of this many products by 2 %, sums of 5,120 by 9 %. Measured on an H200 on
/// 2026-11-27. As here, torchao uses fast accumulation for results and f32 for gradients:
/// <https://github.com/pytorch/ao/blob/024fe94fd86a94f43be1f0dd62201bd92a313dcb/torchao/float8/config.py>.
const FAST_TERMS: usize = 1280;

/// Whether cuBLASLt may support scaled products of codes of this kind with results of `dtype`.
pub(super) fn is_possible(gpu: &Gpu, kind: Codes, dtype: DType) -> bool {
    kind == Codes::E4m3 && gpu.runs_hopper_kernels() && matches!(dtype, DType::F16 | DType::BF16)
}

/// Writes the product x wᵀ to `y`: `x` is (rows, columns), `w` is (outputs, columns), and `y` is (rows, outputs). The
/// rows of `w` are divided into parts. An element of y is the sum of products of codes, times the scales of its row in
/// x and of its row in w, plus the addends. Returns false if the device, format or dtype is not supported.
pub(super) fn product(
    gpu: &Gpu,
    kind: Codes,
    x: &Rounded,
    w: &Quantized,
    y: &Raw,
    addends: Addends<'_>,
) -> Result<bool> {
    // Only bf16 results use fast accumulation. For f16 results its error would dominate that of rounding the sum.
    let is_fast = y.dtype() == DType::BF16 && x.columns <= FAST_TERMS;
    if !is_possible(gpu, kind, y.dtype()) {
        return Ok(false);
    }
    let mut start = 0;
    for part in w.parts.iter().filter(|part| part.rows > 0) {
        let Some(scales) = scale_vector(part)? else { return Ok(false) };
        if !write_product(gpu, x, (&part.codes, &scales), (y, start), addends, is_fast)? {
            return Ok(false);
        }
        start += part.rows;
    }
    Ok(true)
}

/// A scale for each row of a part, at an address that cuBLASLt accepts; `None` if the part does not have 8-bit codes.
fn scale_vector(part: &Part) -> Result<Option<Raw>> {
    let Some(scales) = part.row_scales() else { return Ok(None) };
    // The part has one scale for all rows.
    if scales.elem_count() != part.rows {
        return compute::contiguous(&scales.broadcast_as(part.rows)?).map(Some);
    }
    let is_aligned = address(OP, scales)?.is_multiple_of(ALIGNMENT);
    if is_aligned { Ok(Some(scales.clone())) } else { crate::raw::own_copy(scales).map(Some) }
}

/// Writes the product of `x` with n rows of a matrix, given by their codes (n, columns) and scales (n), to n columns of
/// `y` from column `start` on. `addends` are those of all columns of `y`. With `is_fast`, sums may have fewer bits: see
/// [`FAST_TERMS`]. Returns false if cuBLASLt does not support the product.
pub(super) fn write_product(
    gpu: &Gpu,
    x: &Rounded,
    (codes, scales): (&Raw, &Raw),
    (y, start): (&Raw, usize),
    addends: Addends<'_>,
    is_fast: bool,
) -> Result<bool> {
    let dtype = y.dtype();
    // The address of column `start` of a matrix's first row, or of element `start` of a vector.
    let from_start =
        |raw: &Raw| -> Result<u64> { Ok(address(OP, raw)? + (start * raw.dtype().size_in_bytes()) as u64) };
    let operands = Scaled {
        x: address(OP, &x.codes)?,
        x_scales: address(OP, &x.scales)?,
        w: address(OP, codes)?,
        w_scales: address(OP, scales)?,
        bias: addends.bias.map(from_start).transpose()?,
        addend: addends.residual.map(from_start).transpose()?,
        y: from_start(y)?,
        stride: y.dims()[1],
        is_fast,
    };
    let n = scales.elem_count();
    let sizes = [x.rows, n, x.columns];
    // SAFETY: `x` has codes and scales for its rows, and `codes` and `scales` have `n` rows. y and the addends have the
    // columns from `start` to `start + n`; y and the residual have the rows of `x`.
    unsafe { scaled_product_of_codes(OP, gpu, operands, sizes, dtype) }
}
