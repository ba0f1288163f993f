//! Reductions and cumulative sums on CUDA devices.

use candle_core::DType;
use trainable_candle_cuda::kernels::reduce::{
    ARGMAX, Argmax, CUMSUM, MAX_COLUMNS, MAX_ROWS, MIN_COLUMNS, MIN_ROWS, SUM_COLUMNS, SUM_ROWS, SumRows,
};

use super::copy::{contiguous, copy};
use super::gpu::Gpu;
use super::launch::{Kernel, Shape, accumulator, empty, input, output, suffix, suffixes};
use crate::cpu::reduce::{check_dims, check_not_empty, groups, outer_n_inner, reduced_dims};
use crate::{Raw, Result};

/// Does on a CUDA device what [`cpu::sum`](crate::cpu::sum) does on the CPU.
pub fn sum(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    reduce("sum", x, dims, keepdim, 1.0)
}

/// Does on a CUDA device what [`cpu::mean`](crate::cpu::mean) does on the CPU.
pub fn mean(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_dims("mean", x, dims)?;
    let count: usize = dims.iter().map(|&d| x.dims()[d]).product();
    reduce("mean", x, dims, keepdim, count as f64)
}

/// Does on a CUDA device what [`cpu::max`](crate::cpu::max) does on the CPU.
pub fn max(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_not_empty("max", x, dims)?;
    reduce("max", x, dims, keepdim, 1.0)
}

/// Does on a CUDA device what [`cpu::min`](crate::cpu::min) does on the CPU.
pub fn min(x: &Raw, dims: &[usize], keepdim: bool) -> Result<Raw> {
    check_not_empty("min", x, dims)?;
    reduce("min", x, dims, keepdim, 1.0)
}

/// Reduces `x` along `dims` by the function that `op` names, and divides the results by `divisor`.
fn reduce(op: &'static str, x: &Raw, dims: &[usize], keepdim: bool, divisor: f64) -> Result<Raw> {
    check_dims(op, x, dims)?;
    if dims.is_empty() {
        return copy(x);
    }
    // Neighbouring dimensions that are all reduced, or all kept, are merged: (whether it is reduced, size) of each.
    let mut groups = groups(x.dims(), dims);
    let mut result = contiguous(x)?;
    // Merged dimensions are reduced one after the other. Only the final results are rounded to x's dtype and divided.
    while let Some(index) = groups.iter().rposition(|&(reduced, _)| reduced) {
        let size = |groups: &[(bool, usize)]| groups.iter().map(|&(_, n)| n).product();
        let sizes = [size(&groups[..index]), groups[index].1, size(&groups[index + 1..])];
        groups[index] = (false, 1);
        let is_final = !groups.iter().any(|&(reduced, _)| reduced);
        result =
            along(op, &result, sizes, if is_final { (x.dtype(), divisor) } else { (accumulator(x.dtype()), 1.0) })?;
    }
    Ok(result.reshape(reduced_dims(x.dims(), dims, keepdim).as_slice())?)
}

/// Reduces `x`, read as (outer, n, inner), along n to (outer, 1, inner). The results are divided by `divisor` and
/// written in `dtype`.
fn along(op: &'static str, x: &Raw, [outer, n, inner]: [usize; 3], (dtype, divisor): (DType, f64)) -> Result<Raw> {
    let chunk = chunk_length(outer, n, inner);
    // An `n` of 0 counts as one empty chunk, whose sum is 0.
    let chunks = n.div_ceil(chunk).max(1);
    if chunks == 1 {
        return reduce_chunks(op, x, [outer, n, inner], chunk, (dtype, divisor));
    }
    let partial = reduce_chunks(op, x, [outer, n, inner], chunk, (accumulator(x.dtype()), 1.0))?;
    reduce_chunks(op, &partial, [outer, chunks, inner], chunks, (dtype, divisor))
}

/// The length of the chunks into which `n` is split. Chunks are reduced in parallel. The length depends on the sizes
/// alone, so results are repeatable.
fn chunk_length(outer: usize, n: usize, inner: usize) -> usize {
    // Enough blocks to fill a large GPU, but `n` is not split into chunks shorter than `least`.
    const BLOCKS: usize = 1024;
    // `tasks` is the number of blocks without a split: for a row each, or for 32 columns each. The values of `least`
    // give each of a block's 256 threads 32 elements of a row, or 16 elements of a column.
    let (tasks, least) = if inner == 1 { (outer, 8192) } else { (outer * inner.div_ceil(32), 128) };
    n.div_ceil(BLOCKS.div_ceil(tasks.max(1))).max(least)
}

/// Reduces each chunk of `n` on its own, to (outer, chunks, inner). The results are divided by `divisor` and written in
/// `dtype`.
fn reduce_chunks(
    op: &'static str,
    x: &Raw,
    [outer, n, inner]: [usize; 3],
    chunk: usize,
    (dtype, divisor): (DType, f64),
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let chunks = n.div_ceil(chunk).max(1);
    let y = empty(op, gpu, &[outer, chunks, inner], dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let (kernel, shape) = if inner == 1 {
        // A block has 256 threads: a warp for each of 8 chunks, or all threads for one long chunk.
        let [threads, block_chunks] = if n.min(chunk) <= 1024 { [32, 8] } else { [256, 1] };
        let shape = Shape::linear(op, (outer * chunks).div_ceil(block_chunks as usize), threads)?;
        (rows_kernel(op), Shape { block: [threads, block_chunks, 1], ..shape })
    } else {
        // A block reduces 32 columns of one chunk: it has 8 rows of 32 threads, a thread for each column in each row.
        // The first axis of the grid has the groups of 32 columns, the second has the chunks.
        let shape = Shape::linear(op, inner.div_ceil(32), 32)?;
        // At most 65,535 blocks fit along the second axis; if there are more chunks, a block takes several in turn.
        let chunk_blocks = (outer * chunks).min(65_535) as u32;
        (columns_kernel(op), Shape { grid: [shape.grid[0], chunk_blocks, 1], block: [32, 8, 1], shared: 0 })
    };
    let function = gpu.function(kernel, suffixes(op, x.dtype(), dtype)?)?;
    let [outer, n, inner, chunk] = [outer, n, inner, chunk].map(|size| size as u64);
    let arguments = SumRows { y: output(op, &y)?, x: input(op, x)?, outer, n, inner, chunk, divisor };
    // SAFETY: result and operand are dense and of these sizes.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(y)
}

/// The kernel for `inner` = 1. Means are sums that are divided. The kernels of sums, maxima and minima, for rows and
/// for columns, all have the arguments of `SumRows`.
fn rows_kernel(op: &str) -> &'static Kernel<SumRows> {
    match op {
        "max" => &MAX_ROWS,
        "min" => &MIN_ROWS,
        _ => &SUM_ROWS,
    }
}

/// The kernel for other values of `inner`.
fn columns_kernel(op: &str) -> &'static Kernel<SumRows> {
    match op {
        "max" => &MAX_COLUMNS,
        "min" => &MIN_COLUMNS,
        _ => &SUM_COLUMNS,
    }
}

/// Does on a CUDA device what [`cpu::argmax`](crate::cpu::argmax) does on the CPU.
pub fn argmax(x: &Raw, dim: usize, keepdim: bool) -> Result<Raw> {
    const OP: &str = "argmax";
    check_not_empty(OP, x, &[dim])?;
    lines(OP, &ARGMAX, x, dim, &reduced_dims(x.dims(), &[dim], keepdim), DType::U32)
}

/// Does on a CUDA device what [`cpu::cumsum`](crate::cpu::cumsum) does on the CPU.
pub fn cumsum(x: &Raw, dim: usize) -> Result<Raw> {
    const OP: &str = "cumsum";
    check_dims(OP, x, &[dim])?;
    lines(OP, &CUMSUM, x, dim, x.dims(), x.dtype())
}

/// Runs a kernel with a warp for each line of elements along `dim`. The result has the shape `dims` and the dtype
/// `dtype`. The kernels of argmax and cumsum have the same arguments.
fn lines(op: &'static str, kernel: &Kernel<Argmax>, x: &Raw, dim: usize, dims: &[usize], dtype: DType) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let function = gpu.function(kernel, suffix(op, x.dtype())?)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let [outer, n, inner] = outer_n_inner(x.dims(), dim);
    // 32 threads, a warp, for each line.
    let shape = Shape::threads(op, outer * inner * 32)?;
    let [outer, n, inner] = [outer, n, inner].map(|size| size as u64);
    let arguments = Argmax { y: output(op, &y)?, x: input(op, &x)?, outer, n, inner };
    // SAFETY: result and operand are dense and of these sizes.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(y)
}
