//! Products of 8-bit codes on compute capability 9.0: the host side of `codes_hopper.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::codes_hopper::{MODULE, ProductOfCodesInt8N80 as Arguments};
use trainable_candle_cuda::structs::{Address, CodeMaps, CodePart, CodeParts, TensorMap};

use super::{Addends, MOST_PARTS, OP, Rounded};
use crate::cuda::launch::{Shape, address, count32, input, optional_input, output, suffix};
use crate::cuda::tensor_map::{Encoder, NO_MAP};
use crate::cuda::{Codes, Gpu};
use crate::{Raw, Result};

/// Rows of a block's tile, and the codes of a row that one stage holds.
const ROWS: usize = 128;
const STEP: usize = 128;
/// The work on a tile besides its products takes about as long as the products of this many columns: the tile's rows are
/// copied and read however many columns it has.
const REST: usize = 100;

/// A kernel: the columns of a block's tile, the number of stages, and the end of its name.
struct Tile {
    columns: usize,
    stages: usize,
    name: &'static str,
}

const NARROW: Tile = Tile { columns: 80, stages: 8, name: "_n80" };
const INT8_TILES: [Tile; 4] = [
    Tile { columns: 256, stages: 4, name: "_n256" },
    Tile { columns: 160, stages: 6, name: "_n160" },
    Tile { columns: 128, stages: 6, name: "_n128" },
    NARROW,
];

impl Tile {
    /// The number of clusters for all tiles, if each computes two tiles, one below the other.
    fn clusters(&self, rows: usize, parts: &[CodePart]) -> usize {
        let columns = |part: &CodePart| (part.rows as usize).div_ceil(self.columns);
        rows.div_ceil(2 * ROWS) * parts.iter().map(columns).sum::<usize>()
    }

    /// Bytes of the stages, of their barriers, and of the factors and addends of two tiles' columns.
    const fn shared(&self) -> u32 {
        (self.stages * ((ROWS + self.columns) * STEP + 16) + 16 * self.columns) as u32
    }
}

/// The kernel for a product with `rows` rows, on a device that computes `most` clusters at a time; `None` if cuBLASLt is
/// expected to be faster.
///
/// For int8, this is the kernel that is expected to take the least time. For e4m3 there is one kernel. It is faster than
/// cuBLASLt, which has tiles of 128 columns, if its clusters keep the device busy for one or two rounds: then cuBLASLt's
/// tiles leave a part of the device idle. Measured with the sizes of SDXL and Flux.
fn choose(kind: Codes, rows: usize, parts: &[CodePart], most: usize) -> Option<&'static Tile> {
    let rounds = |tile: &Tile| tile.clusters(rows, parts).div_ceil(most);
    match kind {
        Codes::Int8 => INT8_TILES.iter().min_by_key(|tile| rounds(tile) * (tile.columns + REST)),
        Codes::E4m3 => {
            let (clusters, rounds) = (NARROW.clusters(rows, parts), rounds(&NARROW));
            (rounds <= 2 && 8 * clusters >= 7 * rounds * most).then_some(&NARROW)
        }
    }
}

/// Writes x Wᵀ plus the addends to `y`, where the rows of W are those of the `count` parts. An element of y is the sum of
/// products of codes, times the scales of its row and column, plus the bias, rounded; then the residual is added. Returns
/// false if the device or the dtype is not supported, or if cuBLASLt is expected to be faster.
pub(super) fn product(
    gpu: &Gpu,
    kind: Codes,
    x: &Rounded,
    (parts, count): (CodeParts, usize),
    y: &Raw,
    Addends { bias, residual }: Addends<'_>,
) -> Result<bool> {
    if !gpu.runs_hopper_kernels() || MODULE.image.is_empty() || !matches!(y.dtype(), DType::F16 | DType::BF16) {
        return Ok(false);
    }
    let most = (gpu.multiprocessors() / 2).max(1);
    let list = &parts.list[..count];
    let Some(tile) = choose(kind, x.rows, list, most) else { return Ok(false) };
    let encoder = Encoder::new(OP, DType::U8)?;
    let inner = x.columns as u64;
    let map = |at: Address, rows: u64, box_rows: usize| {
        encoder.boxes(at, [inner, 1, rows], [STEP as u32, 1, box_rows as u32])
    };
    let mut w: [TensorMap; MOST_PARTS] = [NO_MAP; MOST_PARTS];
    for (part, place) in list.iter().zip(&mut w).filter(|(part, _)| part.rows > 0) {
        *place = map(part.codes, u64::from(part.rows), tile.columns / 2)?;
    }
    let maps = CodeMaps { x: map(address(OP, &x.codes)?, x.rows as u64, ROWS)?, w };
    let clusters = tile.clusters(x.rows, list).clamp(1, most);
    let arguments = Arguments {
        out: output(OP, y)?,
        bias: optional_input(OP, bias)?,
        residual: optional_input(OP, residual)?,
        row_scales: input(OP, &x.scales)?,
        maps,
        parts,
        rows: count32(OP, x.rows)?,
        inner: count32(OP, x.columns)?,
        stride: count32(OP, y.dims()[1])?,
        count: count32(OP, count)?,
    };
    let shape = Shape { grid: [2 * clusters as u32, 1, 1], block: [384, 1, 1], shared: tile.shared() };
    let name = match kind {
        Codes::Int8 => "product_of_codes_int8",
        Codes::E4m3 => "product_of_codes_e4m3",
    };
    let function = gpu.named::<Arguments>(name, tile.name, suffix(OP, y.dtype())?)?;
    // SAFETY: codes, scales, addends and y have these rows and columns, and parts cover the columns.
    unsafe { function.launch(OP, gpu, shape, arguments) }?;
    Ok(true)
}
