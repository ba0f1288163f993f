//! Picking elements by ids, and sums over repeated ids in their order.

use candle_core::DType;
use trainable_candle_cuda::modules::INDEX;

use super::copy::{contiguous, fill};
use super::gpu::Gpu;
use super::launch::{Shape, address, count32, empty, launch, suffix, wide};
use crate::{Raw, Result};

/// A tensor around the dimension that is indexed: elements before, in and after it; and how many ids there are along it.
struct Around {
    outer: usize,
    size: usize,
    count: usize,
    inner: usize,
}

impl Around {
    fn new(dims: &[usize], dim: usize, size: usize, count: usize) -> Self {
        Self { outer: dims[..dim].iter().product(), size, count, inner: dims[dim + 1..].iter().product() }
    }
}

fn with_size(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

/// Positions in device memory, as the kernels read them.
fn ids(op: &'static str, positions: &[usize], like: &Raw) -> Result<Raw> {
    let ids = positions.iter().map(|&position| count32(op, position)).collect::<Result<Vec<u32>>>()?;
    Ok(Raw::from_vec(ids, positions.len(), like.device())?)
}

/// `y[o, j, i] = x[o, positions[j], i]`.
pub fn select(op: &'static str, x: &Raw, positions: &[usize], dim: usize) -> Result<Raw> {
    let around = Around::new(x.dims(), dim, x.dims()[dim], positions.len());
    let dims = with_size(x.dims(), dim, positions.len());
    pick(op, "index_select_forward", x, positions, &dims, &around, wide(x.dtype()))
}

/// `y[o, j, i] = x[o, positions[o, j, i], i]`, with `count` elements along `dim` of the result.
pub fn gather(op: &'static str, x: &Raw, positions: &[usize], dim: usize, count: usize) -> Result<Raw> {
    let around = Around::new(x.dims(), dim, x.dims()[dim], count);
    let dims = with_size(x.dims(), dim, count);
    pick(op, "gather_forward", x, positions, &dims, &around, 1)
}

fn pick(
    op: &'static str,
    name: &'static str,
    x: &Raw,
    positions: &[usize],
    dims: &[usize],
    around: &Around,
    each: usize,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, dims, x.dtype())?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let ids = ids(op, positions, &x)?;
    let function = gpu.function(&INDEX, name, suffix(op, x.dtype())?)?;
    let shape = Shape::flat(y.elem_count(), each);
    let (from, at, to, none) = (address(op, &x)?, address(op, &ids)?, address(op, &y)?, 0u64);
    let (outer, size, count) = (around.outer as u64, count32(op, around.size)?, count32(op, around.count)?);
    let (inner, bytes) = (count32(op, around.inner)?, 4u32);
    // SAFETY: the kernel takes the values, the ids, which the caller has checked, the result and their sizes.
    unsafe { launch!(op, gpu, function, shape, from, at, to, none, outer, size, count, inner, bytes) }?;
    Ok(y)
}

/// The gradient of [`select`], with `size` elements along `dim`.
pub fn select_backward(op: &'static str, g: &Raw, positions: &[usize], dim: usize, size: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, g)?;
    let g = contiguous(g)?;
    let around = Around::new(g.dims(), dim, size, positions.len());
    let dx = empty(op, gpu, &with_size(g.dims(), dim, size), g.dtype())?;
    if dx.elem_count() == 0 {
        return Ok(dx);
    }
    // Few ids of many rows: only the rows that they name are written.
    let scatters = positions.len() < size;
    if scatters || positions.is_empty() {
        fill(&dx, 0.0)?;
    }
    if positions.is_empty() {
        return Ok(dx);
    }
    let ids = ids(op, positions, &g)?;
    let tiles = (around.outer * around.inner).div_ceil(128 * wide(g.dtype()));
    let tasks = tiles * if scatters { around.count } else { around.size };
    let shape = Shape { grid: [tasks.clamp(1, i32::MAX as usize) as u32, 1, 1], block: [128, 1, 1], shared: 0 };
    let (from, at, to, none) = (address(op, &g)?, address(op, &ids)?, address(op, &dx)?, 0u64);
    let (outer, size, count) = (around.outer as u64, count32(op, around.size)?, count32(op, around.count)?);
    let (inner, bytes) = (count32(op, around.inner)?, 4u32);
    let name = if scatters { "index_select_scatter" } else { "index_select_backward" };
    let function = gpu.function(&INDEX, name, suffix(op, g.dtype())?)?;
    // SAFETY: the kernel takes the gradient, the ids, the result and their sizes; one piece needs no partial sums.
    unsafe {
        if scatters {
            launch!(op, gpu, function, shape, from, at, to, outer, size, count, inner, bytes)
        } else {
            launch!(op, gpu, function, shape, from, at, to, none, outer, size, count, inner, bytes)
        }
    }?;
    Ok(dx)
}

/// The gradient of [`gather`], with `size` elements along `dim`.
pub fn gather_backward(op: &'static str, g: &Raw, positions: &[usize], dim: usize, size: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, g)?;
    let g = contiguous(g)?;
    let around = Around::new(g.dims(), dim, size, g.dims()[dim]);
    let dx = empty(op, gpu, &with_size(g.dims(), dim, size), g.dtype())?;
    if dx.elem_count() == 0 {
        return Ok(dx);
    }
    if positions.is_empty() {
        fill(&dx, 0.0)?;
        return Ok(dx);
    }
    let ids = ids(op, positions, &g)?;
    let function = gpu.function(&INDEX, "gather_backward", suffix(op, g.dtype())?)?;
    let shape = Shape::flat(dx.elem_count(), 1);
    let (from, at, to) = (address(op, &g)?, address(op, &ids)?, address(op, &dx)?);
    let (outer, size, count) = (around.outer as u64, count32(op, around.size)?, count32(op, around.count)?);
    let (inner, bytes) = (count32(op, around.inner)?, 4u32);
    // SAFETY: the kernel takes the gradient, the ids, the result and their sizes.
    unsafe { launch!(op, gpu, function, shape, from, at, to, outer, size, count, inner, bytes) }?;
    Ok(dx)
}

/// Class ids of rows in device memory, -1 where there is none.
pub(super) fn classes(targets: &[Option<usize>], like: &Raw) -> Result<Raw> {
    let ids: Vec<i64> = targets.iter().map(|target| target.map_or(-1, |class| class as i64)).collect();
    let raw = Raw::from_vec(ids, targets.len(), like.device())?;
    debug_assert_eq!(raw.dtype(), DType::I64);
    Ok(raw)
}
