//! Products of codes on compute capability 9.0: the host side of `codes_hopper.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::codes_hopper::{MODULE, PRODUCT_OF_CODES_INT8, ProductOfCodesInt8 as Arguments};
use trainable_candle_cuda::structs::{Address, CodeMaps, CodeParts, TensorMap};

use super::{MOST_PARTS, OP, Rounded};
use crate::cuda::launch::{Shape, address, count32, input, optional_input, output, suffix};
use crate::cuda::tensor_map::{Encoder, NO_MAP};
use crate::cuda::{Codes, Gpu};
use crate::{Raw, Result};

/// Number of rows of the tile of y that a thread block computes.
const ROWS: usize = 128;
/// Number of columns of this tile.
const COLUMNS: usize = 256;
/// Number of codes of each row of x and W that one stage of the pipeline holds.
const STEP: u32 = 128;
/// Number of bytes of shared memory for the pipeline's four stages and their barriers.
const SHARED: u32 = 4 * (ROWS + COLUMNS) as u32 * STEP + 64;

/// Writes x Wᵀ + b to `y`, where the rows of W are those of the `count` parts. An element of y is the sum of products of codes, times
/// the scales of its row and column, plus the bias. Returns false if the device, format or dtype is not supported.
pub(super) fn product(
    gpu: &Gpu,
    kind: Codes,
    x: &Rounded,
    (parts, count): (CodeParts, usize),
    y: &Raw,
    bias: Option<&Raw>,
) -> Result<bool> {
    if kind != Codes::Int8
        || !gpu.is_hopper()
        || MODULE.image.is_empty()
        || !matches!(y.dtype(), DType::F16 | DType::BF16)
    {
        return Ok(false);
    }
    let encoder = Encoder::new(OP, DType::U8)?;
    let inner = x.columns as u64;
    let map = |at: Address, rows: u64| encoder.boxes(at, [inner, 1, rows], [STEP, 1, 128]);
    let mut w: [TensorMap; MOST_PARTS] = [NO_MAP; MOST_PARTS];
    for (part, place) in parts.list.iter().take(count).zip(&mut w).filter(|(part, _)| part.rows > 0) {
        *place = map(part.codes, u64::from(part.rows))?;
    }
    let maps = CodeMaps { x: map(address(OP, &x.codes)?, x.rows as u64)?, w };
    let tiles: usize = parts.list.iter().take(count).map(|part| (part.rows as usize).div_ceil(COLUMNS)).sum();
    // A cluster of two thread blocks computes two tiles at a time, of neighbouring rows and the same columns.
    let clusters = (x.rows.div_ceil(2 * ROWS) * tiles).min(gpu.multiprocessors() / 2).max(1);
    let arguments = Arguments {
        out: output(OP, y)?,
        bias: optional_input(OP, bias)?,
        row_scales: input(OP, &x.scales)?,
        maps,
        parts,
        rows: count32(OP, x.rows)?,
        inner: count32(OP, x.columns)?,
        stride: count32(OP, y.dims()[1])?,
        count: count32(OP, count)?,
    };
    let shape = Shape { grid: [2 * clusters as u32, 1, 1], block: [384, 1, 1], shared: SHARED };
    // SAFETY: codes, scales, bias and y have these rows and columns, and parts cover the columns.
    unsafe { gpu.function(&PRODUCT_OF_CODES_INT8, suffix(OP, y.dtype())?)?.launch(OP, gpu, shape, arguments) }?;
    Ok(true)
}
