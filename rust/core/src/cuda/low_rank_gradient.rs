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
/// The most [`LowRankFactor`]s in one launch, each with [`RANKS`] ranks of a product.
const MOST_PRODUCTS: usize = 48;
/// The ranks (columns of the narrow matrix) that a [`LowRankFactor`] has.
const RANKS: usize = 16;
/// The most ranks of a narrow matrix.
const MOST_RANKS: usize = 64;
/// The columns of the wide matrix that a thread block multiplies.
const COLUMNS: u32 = 64;
/// The number of columns and the distance between rows in elements must be multiples of this number. Addresses must be
/// multiples of the bytes of this number of elements.
const STEP: usize = 8;

/// Computes those of `work` that the kernel supports, if they are enough to keep the GPU busy, and writes their results
/// into `results`. With fewer blocks than multiprocessors, cuBLAS is faster: it also splits the rows among blocks.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the tensors of a product are on different devices, or the driver reports
/// an error.
pub(super) fn run(work: &[Product], results: &mut [Option<Raw>]) -> Result<()> {
    let mut found = Vec::new();
    for (index, product) in work.iter().enumerate() {
        if let Some(gradient) = Gradient::of(product)? {
            found.push((index, gradient));
        }
    }
    let Some((_, first)) = found.first() else { return Ok(()) };
    let (gpu, dtype) = (Gpu::of(OP, first.sum)?, first.dtype);
    // The products of a backward pass may be on several devices; a launch computes the products of one device.
    let device = first.sum.device().clone();
    found.retain(|(_, gradient)| gradient.dtype == dtype && gradient.sum.device().same_device(&device));
    let blocks: usize = found.iter().map(|(_, gradient)| gradient.blocks()).sum();
    if blocks < gpu.multiprocessors() {
        return Ok(());
    }
    while !found.is_empty() {
        let (mut sums, mut list) = (FxHashSet::default(), Vec::with_capacity(MOST_PRODUCTS));
        found.retain(|(index, gradient)| {
            // No two products of a launch may add to the same sum.
            let fits = list.len() + gradient.tiles.len() <= MOST_PRODUCTS && sums.insert(gradient.tiles[0].sum);
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
    /// One [`LowRankFactor`] for each [`RANKS`] ranks.
    tiles: SmallVec<[LowRankFactor; 1]>,
}

impl<'a> Gradient<'a> {
    fn of(product: &'a Product) -> Result<Option<Self>> {
        let Product { a, b, alpha, to: Destination::Sum(sum) } = product else { return Ok(None) };
        let dtype = a.dtype();
        let is_half = matches!(dtype, DType::F16 | DType::BF16) && b.dtype() == dtype;
        if !is_half || sum.dtype() != DType::F32 || !sum.is_contiguous() || a.rank() != 2 || b.rank() != 2 {
            return Ok(None);
        }
        let plan = Plan::of(OP, a, b)?;
        check_destination(OP, &plan, sum, dtype)?;
        same_device(OP, sum, &[a, b])?;
        let (&[m, n], Some(left), Some(right)) = (
            &[plan.m, plan.n],
            row_distance([a.stride()[1], a.stride()[0]]),
            row_distance([b.stride()[0], b.stride()[1]]),
        ) else {
            return Ok(None);
        };
        let is_narrow = |ranks: usize| ranks.is_multiple_of(RANKS) && (RANKS..=MOST_RANKS).contains(&ranks);
        // The gradient of A is (rank, in), that of B is (out, rank).
        let is_left_narrow = is_narrow(m) && (m <= n || !is_narrow(n));
        let (ranks, columns) = if is_left_narrow { (m, n) } else { (n, m) };
        if !is_narrow(ranks) || !columns.is_multiple_of(STEP) || plan.k * columns == 0 {
            return Ok(None);
        }
        let ([narrow, wide], [narrow_row, wide_row]) =
            if is_left_narrow { ([a, b], [left, right]) } else { ([b, a], [right, left]) };
        let (wide, narrow, to) = (address(OP, wide)?, address(OP, narrow)?, address(OP, sum)?);
        if [wide, narrow].iter().any(|at| !at.is_multiple_of((STEP * dtype.size_in_bytes()) as Address)) {
            return Ok(None);
        }
        let (rows, columns, all) = (count32(OP, plan.k)?, count32(OP, columns)?, count32(OP, ranks)?);
        let [rank_step, column_step] = if is_left_narrow { [columns, 1] } else { [1, all] };
        let tile = |first: usize| LowRankFactor {
            wide,
            narrow: narrow + (first * dtype.size_in_bytes()) as Address,
            sum: to + (first * rank_step as usize * DType::F32.size_in_bytes()) as Address,
            rows,
            columns,
            wide_row,
            narrow_row,
            rank_step,
            column_step,
            scale: *alpha as f32,
            unused: 0,
        };
        Ok(Some(Self { sum, dtype, tiles: (0..ranks).step_by(RANKS).map(tile).collect() }))
    }

    fn blocks(&self) -> usize {
        self.tiles.iter().map(|tile| tile.columns.div_ceil(COLUMNS) as usize).sum()
    }
}

fn launch(gpu: &Gpu, dtype: DType, products: &[LowRankFactor]) -> Result<()> {
    let (mut list, mut ends, mut end) = ([LowRankFactor::default(); MOST_PRODUCTS], [u32::MAX; MOST_PRODUCTS], 0);
    list[..products.len()].copy_from_slice(products);
    for (product, place) in products.iter().zip(&mut ends) {
        end += product.columns.div_ceil(COLUMNS);
        *place = end;
    }
    let function = gpu.function(&LOW_RANK_GRADIENT, suffix(OP, dtype)?)?;
    let shape = Shape { grid: [end, 1, 1], block: [256, 1, 1], shared: 0 };
    // SAFETY: `Gradient::of` has checked that the matrices have these sizes; the sums are different tensors.
    unsafe { function.launch(OP, gpu, shape, LowRankGradient { products: LowRankFactors { ends, list } }) }
}

/// The distance in elements between the rows of a matrix; `None` if a row is not contiguous or the distance is no
/// multiple of [`STEP`].
fn row_distance([row, column]: [usize; 2]) -> Option<u32> {
    if column == 1 && row.is_multiple_of(STEP) { u32::try_from(row).ok() } else { None }
}
