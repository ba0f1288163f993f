//! Products of 8-bit codes on compute capability 9.0: the host side of `codes_hopper.cu`.

use candle_core::DType;
use trainable_candle_cuda::kernels::codes_hopper::{MODULE, ProductOfCodesInt8N80 as Arguments};
use trainable_candle_cuda::structs::{Address, CodeMaps, CodePart, CodeParts, TensorMap};

use super::{Addends, MOST_PARTS, OP, Rounded};
use crate::cuda::launch::{Shape, address, count32, input, optional_input, output, suffix};
use crate::cuda::tensor_map::{Encoder, NO_MAP};
use crate::cuda::{Codes, Gpu};
use crate::{Raw, Result};

/// The number of rows of a block's tile.
const ROWS: usize = 128;
/// How many codes of each row of x and W one stage holds. A stage is a buffer in shared memory.
const STEP: usize = 128;
/// Besides the products, a block copies and reads the rows of x for its tile. This takes about as long as the products
/// of this many columns, whatever the number of the tile's columns.
const OVERHEAD_COLUMNS: usize = 100;

/// A kernel, described by the tile of the result that each of its blocks computes at a time.
struct Tile {
    columns: usize,
    stages: usize,
    /// The end of the kernel's name before the dtype.
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
    /// The number of clusters for all tiles of the result, if each cluster (of two blocks) computes two tiles, one
    /// below the other. `rows` is the number of rows of the result; its columns are the rows of `parts`.
    fn clusters(&self, rows: usize, parts: &[CodePart]) -> usize {
        let tiles_across = |part: &CodePart| (part.rows as usize).div_ceil(self.columns);
        rows.div_ceil(2 * ROWS) * parts.iter().map(tiles_across).sum::<usize>()
    }

    /// A block's bytes of shared memory: the stages, 16 bytes of barriers for each stage, and 16 bytes for each column,
    /// namely a scale and a bias in f32 for the tile that the block computes and for the one that it computes next.
    const fn shared_bytes(&self) -> u32 {
        (self.stages * ((ROWS + self.columns) * STEP + 16) + 16 * self.columns) as u32
    }
}

/// The kernel for a product with `rows` rows, on a device that computes `most_clusters` clusters at a time; `None` if
/// cuBLASLt is expected to be faster.
///
/// The device computes the clusters in rounds of `most_clusters`. For int8, returns the kernel that is expected to take
/// the least time. For e4m3 there is one kernel. It is faster than cuBLASLt, which has tiles of 128 columns, if its
/// clusters fill at least 7/8 of one or two rounds: then cuBLASLt's tiles leave a part of the device idle. Measured
/// with the sizes of SDXL and Flux.
fn choose(kind: Codes, rows: usize, parts: &[CodePart], most_clusters: usize) -> Option<&'static Tile> {
    let rounds = |tile: &Tile| tile.clusters(rows, parts).div_ceil(most_clusters);
    match kind {
        Codes::Int8 => INT8_TILES.iter().min_by_key(|tile| rounds(tile) * (tile.columns + OVERHEAD_COLUMNS)),
        Codes::E4m3 => {
            let (clusters, rounds) = (NARROW.clusters(rows, parts), rounds(&NARROW));
            (rounds <= 2 && 8 * clusters >= 7 * rounds * most_clusters).then_some(&NARROW)
        }
    }
}

/// Writes x Wᵀ plus the addends to `y`, where x and W are matrices of codes and W consists of the rows of the first
/// `count` parts. An element of y is the sum of products of codes, times the scales of its row and column, plus the
/// bias, rounded; then the residual is added. Returns false if the device or the dtype is not supported, if the build
/// has no compiled code of the kernels (an empty image), or if cuBLASLt is expected to be faster.
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
    // A cluster has two blocks, and a multiprocessor runs one block at a time.
    let most_clusters = (gpu.multiprocessors() / 2).max(1);
    let list = &parts.list[..count];
    let Some(tile) = choose(kind, x.rows, list, most_clusters) else { return Ok(false) };
    let encoder = Encoder::new(OP, DType::U8)?;
    let inner = x.columns as u64;
    // A tensor map describes a matrix of codes to the copy engine, which copies a box of rows and columns at a time.
    // `boxes` takes three dimensions, so the second of them has the size 1.
    let map = |at: Address, rows: u64, box_rows: usize| {
        encoder.boxes(at, [inner, 1, rows], [STEP as u32, 1, box_rows as u32])
    };
    let mut w: [TensorMap; MOST_PARTS] = [NO_MAP; MOST_PARTS];
    // Each of a cluster's two blocks copies half of the tile's columns, which are rows of W, for both.
    for (part, place) in list.iter().zip(&mut w).filter(|(part, _)| part.rows > 0) {
        *place = map(part.codes, u64::from(part.rows), tile.columns / 2)?;
    }
    let maps = CodeMaps { x: map(address(OP, &x.codes)?, x.rows as u64, ROWS)?, w };
    let clusters = tile.clusters(x.rows, list).clamp(1, most_clusters);
    // All kernels of `codes_hopper.cu` take the same arguments, so the structure of one of them serves for all.
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
    // Three warpgroups of 128 threads: two multiply, and one copies.
    let shape = Shape { grid: [2 * clusters as u32, 1, 1], block: [3 * 128, 1, 1], shared: tile.shared_bytes() };
    let name = match kind {
        Codes::Int8 => "product_of_codes_int8",
        Codes::E4m3 => "product_of_codes_e4m3",
    };
    let function = gpu.named::<Arguments>(name, tile.name, suffix(OP, y.dtype())?)?;
    // SAFETY: codes, scales, addends and y have these rows and columns, and parts cover the columns.
    unsafe { function.launch(OP, gpu, shape, arguments) }?;
    Ok(true)
}
