//! The CUDA form of picking elements by integer ids (`index_select`, `embedding`, `gather`): `kernels/index.cu`.
//!
//! The host does not read ids, because that would synchronize. A kernel that finds an id out of range writes the id's
//! position to the device's board, memory that the host reads at the next synchronization, which returns the error.

use candle_core::DType;
// `GATHER_FORWARD` takes the arguments of `INDEX_SELECT_FORWARD`.
use trainable_candle_cuda::kernels::index::{
    GATHER_BACKWARD, GATHER_FORWARD, GatherBackward, INDEX_SELECT_BACKWARD, INDEX_SELECT_FORWARD, INDEX_SELECT_SCATTER,
    IndexSelectBackward, IndexSelectForward, IndexSelectScatter,
};

use crate::cuda::launch::{Kernel, Mut, Shape, any_suffix, count32, empty, input, output, suffix, wide};
use crate::cuda::{Gpu, contiguous, fill};
use crate::{Error, Raw, Result};

/// Sizes of a tensor x and of its ids. x is treated as (outer, size, inner), where `size` is the dimension that is
/// indexed. In the formulas below, o, an id and i are indices in these three dimensions, and j is an index along the
/// ids; y and its gradient g are (outer, count, inner).
struct Sizes {
    outer: usize,
    size: usize,
    /// Number of ids along the indexed dimension.
    count: usize,
    inner: usize,
}

impl Sizes {
    fn new(dims: &[usize], dim: usize, size: usize, count: usize) -> Self {
        Self { outer: dims[..dim].iter().product(), size, count, inner: dims[dim + 1..].iter().product() }
    }
}

/// `dims` with `size` in place of dimension `dim`.
fn with_size(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

/// Returns dense ids, as the kernels read them, and the size of an id in bytes.
fn dense_ids(op: &'static str, ids: &Raw) -> Result<(Raw, u32)> {
    let bytes = id_bytes(op, ids)?;
    Ok((contiguous(ids)?, bytes))
}

/// The size of an id in bytes.
///
/// # Errors
/// [`Error::DType`] if the ids are neither i64 nor u32.
pub(in crate::ops) fn id_bytes(op: &'static str, ids: &Raw) -> Result<u32> {
    match ids.dtype() {
        DType::I64 => Ok(8),
        DType::U32 => Ok(4),
        other => {
            Err(Error::dtype(op, format!("ids are {}, expected i64 or u32; convert them with to()", other.as_str())))
        }
    }
}

/// Computes `y[o, j, i] = x[o, ids[j], i]`.
pub fn select(op: &'static str, x: &Raw, ids: &Raw, dim: usize) -> Result<Raw> {
    let sizes = Sizes::new(x.dims(), dim, x.dims()[dim], ids.elem_count());
    let dims = with_size(x.dims(), dim, ids.elem_count());
    pick(op, &INDEX_SELECT_FORWARD, x, ids, &dims, &sizes, wide(x.dtype()))
}

/// Computes `y[o, j, i] = x[o, ids[o, j, i], i]`, with `count` elements along `dim` of the result.
pub fn gather(op: &'static str, x: &Raw, ids: &Raw, dim: usize, count: usize) -> Result<Raw> {
    let sizes = Sizes::new(x.dims(), dim, x.dims()[dim], count);
    let dims = with_size(x.dims(), dim, count);
    let elements_per_thread = 1;
    pick(op, &GATHER_FORWARD, x, ids, &dims, &sizes, elements_per_thread)
}

/// Launches a kernel that picks the elements of a result of shape `dims`. Each thread picks `elements_per_thread`
/// elements.
fn pick(
    op: &'static str,
    kernel: &Kernel<IndexSelectForward>,
    x: &Raw,
    ids: &Raw,
    dims: &[usize],
    sizes: &Sizes,
    elements_per_thread: usize,
) -> Result<Raw> {
    let gpu = Gpu::of(op, x)?;
    let x = contiguous(x)?;
    let y = empty(op, gpu, dims, x.dtype())?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let (ids, bytes) = dense_ids(op, ids)?;
    let function = gpu.function(kernel, any_suffix(op, x.dtype())?)?;
    let shape = Shape::flat(y.elem_count(), elements_per_thread);
    let arguments = IndexSelectForward {
        x: input(op, &x)?,
        ids: input(op, &ids)?,
        y: output(op, &y)?,
        out_of_range: gpu.board().place(op),
        outer: sizes.outer as u64,
        size: count32(op, sizes.size)?,
        count: count32(op, sizes.count)?,
        inner: count32(op, sizes.inner)?,
        id_bytes: bytes,
    };
    // SAFETY: the tensors are dense and of these sizes.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(y)
}

/// The gradient of [`select`]: `dx[o, ids[j], i] += g[o, j, i]`, with `size` elements along `dim`.
pub fn select_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, g)?;
    let g = contiguous(g)?;
    let sizes = Sizes::new(g.dims(), dim, size, ids.elem_count());
    let dx = empty(op, gpu, &with_size(g.dims(), dim, size), g.dtype())?;
    if dx.elem_count() == 0 {
        return Ok(dx);
    }
    // With fewer ids than `size`, the scatter kernel runs (with none, no kernel). It writes only the elements of `dx`
    // that the ids name, so `dx` is set to 0 first.
    let scatters = ids.elem_count() < size;
    if scatters {
        fill(&dx, 0.0)?;
    }
    if ids.elem_count() == 0 {
        return Ok(dx);
    }
    let (ids, bytes) = dense_ids(op, ids)?;
    // The kernels expect 128 threads in a block. Each thread adds the gradients of `wide` elements, so a tile is
    // 128 · `wide` of the (outer, inner) elements. A task is a tile of one id, or of one index along `dim` of `dx`.
    // The scatter kernel is for few ids and writes only the rows of `dx` that they name; the other one writes all. If
    // several ids are equal, the task of the first of them adds the gradients of all.
    let tiles = (sizes.outer * sizes.inner).div_ceil(128 * wide(g.dtype()));
    let tasks = tiles * if scatters { sizes.count } else { sizes.size };
    let shape = Shape { grid: [tasks.clamp(1, i32::MAX as usize) as u32, 1, 1], block: [128, 1, 1], shared: 0 };
    let (dtype, grad, ids, dx_output) = (suffix(op, g.dtype())?, input(op, &g)?, input(op, &ids)?, output(op, &dx)?);
    let (outer, size, count) = (sizes.outer as u64, count32(op, sizes.size)?, count32(op, sizes.count)?);
    let inner = count32(op, sizes.inner)?;
    // SAFETY: the tensors are dense and of these sizes. The second dimension of the grid is 1, so the sums are not
    // split into parts, and no kernel reads or writes `partials`.
    unsafe {
        if scatters {
            let arguments = IndexSelectScatter { grad, ids, dx: dx_output, outer, size, count, inner, id_bytes: bytes };
            gpu.function(&INDEX_SELECT_SCATTER, dtype)?.launch(op, gpu, shape, arguments)
        } else {
            let partials = Mut::NULL;
            let arguments =
                IndexSelectBackward { grad, ids, dx: dx_output, partials, outer, size, count, inner, id_bytes: bytes };
            gpu.function(&INDEX_SELECT_BACKWARD, dtype)?.launch(op, gpu, shape, arguments)
        }
    }?;
    Ok(dx)
}

/// The gradient of [`gather`]: `dx[o, ids[o, j, i], i] += g[o, j, i]`, with `size` elements along `dim`.
pub fn gather_backward(op: &'static str, g: &Raw, ids: &Raw, dim: usize, size: usize) -> Result<Raw> {
    let gpu = Gpu::of(op, g)?;
    let g = contiguous(g)?;
    let sizes = Sizes::new(g.dims(), dim, size, g.dims()[dim]);
    let dx = empty(op, gpu, &with_size(g.dims(), dim, size), g.dtype())?;
    if dx.elem_count() == 0 {
        return Ok(dx);
    }
    if ids.elem_count() == 0 {
        fill(&dx, 0.0)?;
        return Ok(dx);
    }
    let (ids, bytes) = dense_ids(op, ids)?;
    let function = gpu.function(&GATHER_BACKWARD, suffix(op, g.dtype())?)?;
    let elements_per_thread = 1;
    let shape = Shape::flat(dx.elem_count(), elements_per_thread);
    let arguments = GatherBackward {
        grad: input(op, &g)?,
        ids: input(op, &ids)?,
        dx: output(op, &dx)?,
        outer: sizes.outer as u64,
        size: count32(op, sizes.size)?,
        count: count32(op, sizes.count)?,
        inner: count32(op, sizes.inner)?,
        id_bytes: bytes,
    };
    // SAFETY: the tensors are dense and of these sizes.
    unsafe { function.launch(op, gpu, shape, arguments) }?;
    Ok(dx)
}
