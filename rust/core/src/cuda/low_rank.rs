//! The library's own kernels for the low-rank products of adapted linear maps. A term is one such product:
//! hidden (rows, rank) = `scale_hidden` · input (rows, inner) · down (inner, rank), and then
//! dst (rows, outer) += `scale_dst` · hidden · up (rank, outer).

use candle_core::DType;
use smallvec::SmallVec;
use trainable_candle_cuda::kernels::low_rank::{
    LOW_RANK_BACKWARD16, LOW_RANK_BACKWARD32, LOW_RANK_BACKWARD64, LOW_RANK_FORWARD16, LOW_RANK_FORWARD32,
    LOW_RANK_FORWARD64, LowRankForward16,
};
use trainable_candle_cuda::kernels::low_rank_add::LowRankAddForward1;
use trainable_candle_cuda::structs::{
    LowRankAddSizes, LowRankSizes, LowRankSum, LowRankSums, LowRankTerm, LowRankTerms, LowRankTile,
};

use super::gpu::Gpu;
use super::launch::{Address, Shape, address, count32, same_device, suffix};
use crate::raw::storage_identity;
use crate::{Raw, Result, product};

const OP: &str = "low_rank";
/// The most terms of a launch of `low_rank`.
const MOST_TERMS: usize = 4;
/// The rows of dst that a block of threads computes.
const ROWS: usize = 16;
/// The most elements that input and dst of one term have together. For more elements, memory bandwidth matters more
/// than the number of launches, and cuBLAS reads the factors less often than the kernel: on an H200 the kernel is
/// faster than cuBLAS at 4096 rows of 640 + 640 elements (input + dst) and slower at 4096 rows of 1280 + 1280.
const MOST_ELEMENTS: usize = 6 << 20;
/// `inner` and `outer`, the numbers of input and output features, must be multiples of this. It is also the number of
/// columns of dst that a warp computes at a time.
const STEP: usize = 32;
/// The addresses of matrices, and the distances between their rows, must be multiples of this many bytes.
const ALIGNMENT: usize = 16;

/// The most elements of dst, summed over the terms, for which one launch for several terms is faster than a product by
/// cuBLAS and a launch of `low_rank_add`. In the one launch, each term reads the input again, and each block of rows
/// reads the factors again. On an H100 the one launch is slower (12 instead of 9 μs) for three terms of 1024 rows and
/// 1280 + 1280 elements, and faster (4 instead of 6 μs) for two terms of 77 rows and 2048 + 1280 elements.
const MOST_DST_ELEMENTS: usize = 1 << 20;

/// The number of ranks in a tile of `low_rank_add`: a tile is 16 columns of hidden and the 16 rows of up that belong to
/// them.
const TILE: usize = 16;
/// The most tiles that a launch of `low_rank_add` adds to one dst.
const MOST_TILES: usize = 4;
/// The most destinations (dst) of a launch of `low_rank_add`.
const MOST_SUMS: usize = 4;
/// The rows and columns of dst that a block of threads of `low_rank_add` computes.
const ADD_BLOCK: [usize; 2] = [32, 256];
/// The threads of a block of `low_rank_add`: eight warps, each of which computes 32 columns.
const ADD_THREADS: u32 = 256;
/// The most blocks of rows in a launch of `low_rank_add`.
const MOST_ROW_BLOCKS: usize = 65_535;

/// The layout of the factors `down` and `up` in memory, named after the pass that usually has it.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    /// `down` is stored as (rank, inner), `up` as (outer, rank).
    Forward,
    /// `down` is stored as (inner, rank), `up` as (rank, outer).
    Backward,
}

/// Compute all terms, each given with its dst, in one launch. Returns false, and computes nothing, if the kernels do
/// not support the terms or would be slower than cuBLAS.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the tensors of a term are on different devices, or the driver reports an
/// error.
pub fn low_rank(terms: &[(product::LowRankTerm, Raw)], [scale_hidden, scale_dst]: [f64; 2]) -> Result<bool> {
    let elements: usize = terms.iter().map(|(_, dst)| dst.elem_count()).sum();
    let is_fast = terms.len() == 1 || (terms.len() <= MOST_TERMS && elements <= MOST_DST_ELEMENTS);
    let Some((first, first_dst)) = terms.first().filter(|_| is_fast) else { return Ok(false) };
    let Some((direction, mut sizes)) = direction_and_sizes(first, first_dst) else { return Ok(false) };
    let (first_dst_at, rank) = (address(OP, first_dst)?, first.hidden.dims()[1]);
    let mut list = [LowRankTerm::default(); MOST_TERMS];
    for ((term, dst), place) in terms.iter().zip(&mut list) {
        let operands = [&term.input, &term.down, &term.up, &term.hidden];
        same_device(OP, dst, &operands)?;
        let ([input, down, up, hidden], dst_at) = (operands.map(|operand| address(OP, operand)), address(OP, dst)?);
        *place = LowRankTerm { input: input?, down: down?, up: up?, hidden: hidden?, dst: dst_at };
        let LowRankTerm { input, down, up, hidden, .. } = *place;
        let is_aligned = [input, down, up, hidden, dst_at].iter().all(|at| at.is_multiple_of(ALIGNMENT as Address));
        let storage_address = |tensor: &Raw| storage_identity(tensor).0;
        let has_separate_dst = operands.iter().all(|operand| storage_address(operand) != storage_address(dst));
        let is_alike =
            direction_and_sizes(term, dst) == Some((direction, sizes)) && term.input.dtype() == first.input.dtype();
        // In the backward pass, each block computes all terms in turn, so all must add to the same dst. The direction
        // is inferred from the layout of the factors: a forward pass with transposed factors counts as backward.
        let has_first_dst = dst_at == first_dst_at;
        if !is_aligned || !has_separate_dst || !is_alike || (direction == Direction::Backward && !has_first_dst) {
            return Ok(false);
        }
    }
    // In the forward pass the terms run concurrently, so no two terms may add to the same elements. It suffices
    // to compare the first rows of their dsts, because the callers pass column ranges of one matrix.
    let row_bytes = u64::from(sizes.outer) * first.input.dtype().size_in_bytes() as u64;
    let mut dst_addresses: Vec<Address> = list[..terms.len()].iter().map(|term| term.dst).collect();
    dst_addresses.sort_unstable();
    if direction == Direction::Forward && dst_addresses.windows(2).any(|pair| pair[1] - pair[0] < row_bytes) {
        return Ok(false);
    }
    (sizes.terms, sizes.scale_hidden, sizes.scale_dst) = (terms.len() as u32, scale_hidden as f32, scale_dst as f32);
    let gpu = Gpu::of(OP, &first.input)?;
    let kernel = match (direction, rank) {
        (Direction::Forward, 16) => &LOW_RANK_FORWARD16,
        (Direction::Forward, 32) => &LOW_RANK_FORWARD32,
        (Direction::Forward, _) => &LOW_RANK_FORWARD64,
        (Direction::Backward, 16) => &LOW_RANK_BACKWARD16,
        (Direction::Backward, 32) => &LOW_RANK_BACKWARD32,
        (Direction::Backward, _) => &LOW_RANK_BACKWARD64,
    };
    let function = gpu.function(kernel, suffix(OP, first.input.dtype())?)?;
    let concurrent_terms = if direction == Direction::Forward { sizes.terms } else { 1 };
    let blocks = (sizes.rows as usize).div_ceil(ROWS);
    // As `WARPS` in `low_rank.cu`: a higher rank needs more registers in each thread, so fewer warps fit.
    let warps: u32 = if rank == 64 { 8 } else { 16 };
    // The columns of dst are divided into `shares`, so that all multiprocessors have work. The blocks of each share
    // recompute the hidden values, which costs less than idle multiprocessors.
    let most_shares = (sizes.outer as usize).div_ceil(warps as usize * STEP);
    let shares = (gpu.multiprocessors() / (blocks * concurrent_terms as usize)).clamp(1, most_shares);
    let shape = Shape { grid: [blocks as u32, shares as u32, concurrent_terms], block: [32 * warps, 1, 1], shared: 0 };
    // All six kernels take the same arguments; their structure is named after one of them.
    // SAFETY: `direction_and_sizes` has checked that the matrices have these sizes.
    unsafe { function.launch(OP, gpu, shape, LowRankForward16 { terms: LowRankTerms { list }, sizes }) }?;
    Ok(true)
}

/// Adds `alpha` · hidden · up to dst for each [dst, hidden, up] with launches of `low_rank_add`. The caller has checked
/// that the shapes fit, and that dst shares no storage with hidden and up. Returns false, and computes nothing, if
/// `low_rank_add` does not support the matrices.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the driver reports an error.
pub(super) fn add(terms: &[[&Raw; 3]], alpha: f64) -> Result<bool> {
    let mut additions: Vec<Addition<'_>> = Vec::with_capacity(terms.len());
    for term in terms {
        let Some(addition) = Addition::of(term, alpha)? else { return Ok(false) };
        match additions.last_mut() {
            Some(last) if last.takes(&addition) => last.tiles.extend(addition.tiles),
            _ => additions.push(addition),
        }
    }
    let mut rest = additions.as_slice();
    while !rest.is_empty() {
        let count = (1..=rest.len().min(MOST_SUMS)).rev().find(|&count| Addition::fit(&rest[..count])).unwrap_or(1);
        let (together, others) = rest.split_at(count);
        Addition::launch(together)?;
        rest = others;
    }
    Ok(true)
}

/// The products that a launch of `low_rank_add` adds to one dst.
struct Addition<'a> {
    dst: &'a Raw,
    /// The address of dst.
    at: Address,
    /// The number of columns of dst.
    outer: u32,
    direction: Direction,
    sizes: LowRankAddSizes,
    tiles: SmallVec<[LowRankTile; MOST_TILES]>,
}

impl<'a> Addition<'a> {
    /// The addition for one [dst, hidden, up], or None if `low_rank_add` does not support the matrices.
    fn of(&[dst, hidden, up]: &[&'a Raw; 3], alpha: f64) -> Result<Option<Self>> {
        let (dtype, rank) = (dst.dtype(), up.dims()[0]);
        let all = [dst, hidden, up];
        let is_half = matches!(dtype, DType::F16 | DType::BF16);
        let &[rows, outer] = dst.dims() else { return Ok(None) };
        let has_supported_sizes = rank.is_multiple_of(TILE)
            && (1..=MOST_TILES).contains(&(rank / TILE))
            && outer.is_multiple_of(STEP)
            && (1..=MOST_ROW_BLOCKS).contains(&rows.div_ceil(ADD_BLOCK[0]));
        if !is_half || !has_supported_sizes || all.iter().any(|x| x.dtype() != dtype || x.rank() != 2) {
            return Ok(None);
        }
        // Which axis of `up` is contiguous tells the direction: if the rank is, `up` is stored as (outer, rank), and
        // `by_columns` finds the distance between the rows of this matrix.
        let by_columns = row_distance(&[up.stride()[1], up.stride()[0]]).map(|row| (Direction::Forward, row));
        let by_rows = || row_distance(up.stride()).map(|row| (Direction::Backward, row));
        let (Some((direction, up_row)), Some(hidden_row), Some(dst_row)) =
            (by_columns.or_else(by_rows), row_distance(hidden.stride()), row_distance(dst.stride()))
        else {
            return Ok(None);
        };
        let [at, hidden, up] = [address(OP, dst)?, address(OP, hidden)?, address(OP, up)?];
        if [at, hidden, up].iter().any(|at| !at.is_multiple_of(ALIGNMENT as Address)) {
            return Ok(None);
        }
        let (rows, outer) = (count32(OP, rows)?, count32(OP, outer)?);
        let sizes = LowRankAddSizes { rows, hidden_row, up_row, dst_row, scale: alpha as f32 };
        let up_step = if direction == Direction::Forward { TILE } else { TILE * up_row as usize };
        let bytes = |elements: usize| (elements * dtype.size_in_bytes()) as Address;
        let tile = |i: usize| LowRankTile { hidden: hidden + bytes(i * TILE), up: up + bytes(i * up_step) };
        Ok(Some(Self { dst, at, outer, direction, sizes, tiles: (0..rank / TILE).map(tile).collect() }))
    }

    /// Whether the tiles of `other` can be appended to this addition: both add to the same dst, and together have at
    /// most [`MOST_TILES`].
    fn takes(&self, other: &Self) -> bool {
        (self.at, self.outer) == (other.at, other.outer)
            && self.is_like(other)
            && self.tiles.len() + other.tiles.len() <= MOST_TILES
    }

    /// Whether both suit one launch, whatever their dst: they have the same number of rows, distances between rows,
    /// scale and layout of `up`.
    fn is_like(&self, other: &Self) -> bool {
        self.direction == other.direction && self.sizes == other.sizes
    }

    /// The addresses at which the first row of dst begins and ends.
    fn first_row(&self) -> [Address; 2] {
        [self.at, self.at + Address::from(self.outer) * self.dst.dtype().size_in_bytes() as Address]
    }

    /// Whether one launch can compute all of `together`. If there are several, they must be [alike](Self::is_like),
    /// have equally many tiles, and add to different columns of one matrix.
    fn fit(together: &[Self]) -> bool {
        let [first, others @ ..] = together else { return true };
        let mut first_rows: SmallVec<[[Address; 2]; MOST_SUMS]> = together.iter().map(Self::first_row).collect();
        first_rows.sort_unstable();
        // The bytes from the first column of the leftmost dst to the last column of the rightmost one.
        let span = first_rows[first_rows.len() - 1][1] - first_rows[0][0];
        let dst_row_bytes = Address::from(first.sizes.dst_row) * first.dst.dtype().size_in_bytes() as Address;
        others.is_empty()
            || (others.iter().all(|other| other.is_like(first) && other.tiles.len() == first.tiles.len())
                && first_rows.windows(2).all(|pair| pair[0][1] <= pair[1][0])
                && span <= dst_row_bytes)
    }

    /// Queues one launch for additions that [`fit`](Self::fit).
    fn launch(together: &[Self]) -> Result<()> {
        let Some(first) = together.first() else { return Ok(()) };
        let gpu = Gpu::of(OP, first.dst)?;
        let name = match first.direction {
            Direction::Forward => "low_rank_add_forward",
            Direction::Backward => "low_rank_add_backward",
        };
        let function = gpu.named(name, &first.tiles.len().to_string(), suffix(OP, first.dst.dtype())?)?;
        let (mut list, mut blocks) = ([LowRankSum::default(); MOST_SUMS], 0);
        for (sum, place) in together.iter().zip(&mut list) {
            // The blocks of all sums are numbered along x. `end` is the number of the first block after those of `sum`.
            blocks += sum.outer.div_ceil(ADD_BLOCK[1] as u32);
            (place.dst, place.outer, place.end) = (sum.at, sum.outer, blocks);
            place.tiles[..sum.tiles.len()].copy_from_slice(&sum.tiles);
        }
        let grid = [blocks, first.sizes.rows.div_ceil(ADD_BLOCK[0] as u32), 1];
        // The kernels for other numbers of tiles and for the other direction take the same structure.
        let arguments = LowRankAddForward1 { sums: LowRankSums { list }, sizes: first.sizes };
        // SAFETY: `write_products` in `gemm.rs`, which calls `add`, has checked that the matrices have these sizes, and
        // that dst shares no storage with hidden and up.
        unsafe { function.launch(OP, gpu, Shape { grid, block: [ADD_THREADS, 1, 1], shared: 0 }, arguments) }
    }
}

/// The direction and the sizes of a term, or None if the kernels do not support the term's matrices or would be slower
/// than cuBLAS. The caller sets the number of terms and the scales, which are 0 here.
fn direction_and_sizes(term: &product::LowRankTerm, dst: &Raw) -> Option<(Direction, LowRankSizes)> {
    let product::LowRankTerm { input, down, up, hidden } = term;
    let dtype = input.dtype();
    let all = [input, down, up, hidden, dst];
    if !matches!(dtype, DType::F16 | DType::BF16) || all.iter().any(|x| x.dtype() != dtype || x.rank() != 2) {
        return None;
    }
    let &[rows, inner] = input.dims() else { return None };
    let &[rank, outer] = up.dims() else { return None };
    let fits = down.dims() == [inner, rank] && hidden.dims() == [rows, rank] && dst.dims() == [rows, outer];
    let has_supported_sizes = inner.is_multiple_of(STEP) && outer.is_multiple_of(STEP) && rows * inner * outer > 0;
    let is_small = rows * (inner + outer) <= MOST_ELEMENTS;
    if !fits || !has_supported_sizes || !is_small || !matches!(rank, 16 | 32 | 64) {
        return None;
    }
    let by_rows = |x: &Raw| row_distance(x.stride());
    let by_columns = |x: &Raw| row_distance(&[x.stride()[1], x.stride()[0]]);
    let forward = by_columns(down).zip(by_columns(up)).map(|distances| (Direction::Forward, distances));
    let backward = || by_rows(down).zip(by_rows(up)).map(|distances| (Direction::Backward, distances));
    let (direction, (down_row, up_row)) = forward.or_else(backward)?;
    let sizes = LowRankSizes {
        rows: u32::try_from(rows).ok()?,
        inner: u32::try_from(inner).ok()?,
        outer: u32::try_from(outer).ok()?,
        terms: 0,
        input_row: by_rows(input)?,
        hidden_row: by_rows(hidden)?,
        dst_row: by_rows(dst)?,
        down_row,
        up_row,
        scale_hidden: 0.0,
        scale_dst: 0.0,
    };
    Some((direction, sizes))
}

/// The distance in elements between neighbouring rows of a matrix of f16 or bf16, given its strides [row, column]. None
/// if a row is not contiguous or the distance is not a multiple of [`ALIGNMENT`].
fn row_distance(strides: &[usize]) -> Option<u32> {
    let elements = ALIGNMENT / DType::BF16.size_in_bytes();
    match strides {
        &[row, 1] if row.is_multiple_of(elements) => u32::try_from(row).ok(),
        _ => None,
    }
}
