//! Gradients of low-rank factors: `wide^T narrow` or `narrow^T wide`, added to f32 sums. The narrow matrix has one
//! column per rank; the products sum over the rows of both matrices.

use candle_core::DType;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use trainable_candle_cuda::kernels::low_rank_gradient::{LOW_RANK_GRADIENT, LowRankGradient};
use trainable_candle_cuda::structs::{LowRankFactor, LowRankFactors};

use super::gpu::Gpu;
use super::launch::{Address, Shape, address, count32, same_device, suffix};
use crate::cpu::gemm::batch::{Plan, check_destination};
use crate::product::{Destination, Product};
use crate::{Raw, Result};

const OP: &str = "low_rank_gradient";
/// The most tiles in one launch. A tile ([`LowRankFactor`]) is the part of a product for [`RANKS`] ranks.
const MOST_FACTORS: usize = 48;
/// The number of ranks (columns of the narrow matrix) of a tile.
const RANKS: usize = 16;
/// The most ranks of a narrow matrix.
const MOST_RANKS: usize = 64;
/// The columns of the wide matrix that a thread block multiplies.
const COLUMNS: u32 = 64;
/// The threads of a block, as in `low_rank_gradient.cu`.
const THREADS: u32 = 256;
/// The number of columns and the distance between rows in elements must be multiples of this number. Addresses must be
/// multiples of the bytes of this number of elements.
const STEP: usize = 8;

/// Computes those of `work` that the kernel supports and that have the dtype and the device of the first of them.
/// Writes each result into `results` at the product's index; the results of other products stay `None`. Computes
/// nothing if there are fewer blocks than multiprocessors: then cuBLAS is faster, because it also splits the rows among
/// blocks.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) if the shapes of a product and its sum do not fit together,
/// [`Error::Device`](crate::Error::Device) if the tensors of a product are on different devices, or the driver reports
/// an error.
pub(super) fn run(work: &[Product], results: &mut [Option<Raw>]) -> Result<()> {
    let mut gradients = Vec::new();
    for (index, product) in work.iter().enumerate() {
        if let Some(gradient) = Gradient::of(product)? {
            gradients.push((index, gradient));
        }
    }
    let Some((_, first)) = gradients.first() else { return Ok(()) };
    let (gpu, dtype) = (Gpu::of(OP, first.sum)?, first.dtype);
    // The products of a backward pass may be on several devices; a launch computes the products of one device.
    let device = first.sum.device().clone();
    gradients.retain(|(_, gradient)| gradient.dtype == dtype && gradient.sum.device().same_device(&device));
    let blocks: usize = gradients.iter().map(|(_, gradient)| gradient.blocks()).sum();
    if blocks < gpu.multiprocessors() {
        return Ok(());
    }
    while !gradients.is_empty() {
        let (mut sums, mut list) = (FxHashSet::default(), Vec::with_capacity(MOST_FACTORS));
        gradients.retain(|(index, gradient)| {
            // No two products of a launch may add to the same sum, because their blocks run at once, without atomics.
            let fits = list.len() + gradient.tiles.len() <= MOST_FACTORS && sums.insert(gradient.tiles[0].sum);
            if fits {
                list.extend_from_slice(&gradient.tiles);
                results[*index] = Some(gradient.sum.clone());
            }
            !fits
        });
        launch(gpu, dtype, &list)?;
    }
    Ok(())
}

/// A product that the kernel supports.
struct Gradient<'a> {
    sum: &'a Raw,
    dtype: DType,
    /// One tile for each [`RANKS`] ranks.
    tiles: SmallVec<[LowRankFactor; 1]>,
}

impl<'a> Gradient<'a> {
    /// The gradient that `product` computes, or None if the kernel does not support the product.
    fn of(product: &'a Product) -> Result<Option<Self>> {
        let Product { a, b, alpha, to: Destination::Sum(sum) } = product else { return Ok(None) };
        let dtype = a.dtype();
        let is_half = matches!(dtype, DType::F16 | DType::BF16) && b.dtype() == dtype;
        if !is_half || sum.dtype() != DType::F32 || !sum.is_contiguous() || a.rank() != 2 || b.rank() != 2 {
            return Ok(None);
        }
        // `a` is (m, k), `b` is (k, n), and the sum is (m, n).
        let plan = Plan::of(OP, a, b)?;
        check_destination(OP, &plan, sum, dtype)?;
        same_device(OP, sum, &[a, b])?;
        // The kernel takes two matrices that have a row for each of the `plan.k` summands: the transpose of `a`, whose
        // strides are those of `a` exchanged, and `b`.
        let (m, n) = (plan.m, plan.n);
        let (Some(a_row), Some(b_row)) =
            (row_distance([a.stride()[1], a.stride()[0]]), row_distance([b.stride()[0], b.stride()[1]]))
        else {
            return Ok(None);
        };
        let is_narrow = |ranks: usize| ranks.is_multiple_of(RANKS) && (RANKS..=MOST_RANKS).contains(&ranks);
        // The gradient of a LoRA factor A is (rank, inputs), that of a factor B is (outputs, rank). So the narrow
        // matrix is `a` for a factor A, with m ranks, and `b` for a factor B, with n ranks.
        let is_a_narrow = is_narrow(m) && (m <= n || !is_narrow(n));
        let (ranks, columns) = if is_a_narrow { (m, n) } else { (n, m) };
        if !is_narrow(ranks) || !columns.is_multiple_of(STEP) || plan.k * columns == 0 {
            return Ok(None);
        }
        let ([narrow, wide], [narrow_row, wide_row]) =
            if is_a_narrow { ([a, b], [a_row, b_row]) } else { ([b, a], [b_row, a_row]) };
        let (wide, narrow, sum_at) = (address(OP, wide)?, address(OP, narrow)?, address(OP, sum)?);
        if [wide, narrow].iter().any(|at| !at.is_multiple_of((STEP * dtype.size_in_bytes()) as Address)) {
            return Ok(None);
        }
        let (rows, columns, ranks_u32) = (count32(OP, plan.k)?, count32(OP, columns)?, count32(OP, ranks)?);
        // The distance in elements of the sum from one rank to the next, and from one column of the wide matrix to the
        // next: the sum is (ranks, columns) if `a` is narrow, else (columns, ranks).
        let [rank_step, column_step] = if is_a_narrow { [columns, 1] } else { [1, ranks_u32] };
        let tile = |first_rank: usize| LowRankFactor {
            wide,
            narrow: narrow + (first_rank * dtype.size_in_bytes()) as Address,
            sum: sum_at + (first_rank * rank_step as usize * DType::F32.size_in_bytes()) as Address,
            rows,
            columns,
            wide_row,
            narrow_row,
            rank_step,
            column_step,
            scale: *alpha as f32,
            // Padding.
            unused: 0,
        };
        Ok(Some(Self { sum, dtype, tiles: (0..ranks).step_by(RANKS).map(tile).collect() }))
    }

    /// The number of thread blocks.
    fn blocks(&self) -> usize {
        self.tiles.iter().map(|tile| tile.columns.div_ceil(COLUMNS) as usize).sum()
    }
}

/// Queues one launch for `tiles`, of which there are at most [`MOST_FACTORS`].
fn launch(gpu: &Gpu, dtype: DType, tiles: &[LowRankFactor]) -> Result<()> {
    // `ends` has the number of the first block after those of each tile. Unused entries have the largest u32.
    let (mut list, mut ends, mut blocks) = ([LowRankFactor::default(); MOST_FACTORS], [u32::MAX; MOST_FACTORS], 0);
    list[..tiles.len()].copy_from_slice(tiles);
    for (tile, end) in tiles.iter().zip(&mut ends) {
        blocks += tile.columns.div_ceil(COLUMNS);
        *end = blocks;
    }
    let function = gpu.function(&LOW_RANK_GRADIENT, suffix(OP, dtype)?)?;
    let shape = Shape { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared: 0 };
    // SAFETY: `Gradient::of` has checked that the matrices have these sizes; the sums are different tensors.
    unsafe { function.launch(OP, gpu, shape, LowRankGradient { products: LowRankFactors { ends, list } }) }
}

/// The distance in elements between neighbouring rows of a matrix, given its strides; `None` if a row is not contiguous
/// or the distance is not a multiple of [`STEP`].
fn row_distance([row, column]: [usize; 2]) -> Option<u32> {
    if column == 1 && row.is_multiple_of(STEP) { u32::try_from(row).ok() } else { None }
}
