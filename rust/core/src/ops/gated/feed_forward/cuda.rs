//! The CUDA form of `SwiGLU` feed-forward networks: `kernels/feed_forward.cu` and `kernels/feed_forward_backward.cu`.
//!
//! Two inner maps of the input compute the features h and the gate, each of n columns (`width`). The unit is h ·
//! SiLU(gate), elementwise, and the outer map reads the unit. Each map has a low-rank product, scale · (input Aᵀ) Bᵀ,
//! with the down factor A, the up factor B and the hidden values input Aᵀ. The products of the inner maps are late: the
//! kernels here add them to the results of the frozen weights.

use candle_core::DType;
use trainable_candle_cuda::kernels::feed_forward::{
    SWIGLU_FEED_FORWARD_HIDDEN, SWIGLU_FEED_FORWARD_UNIT, SwigluFeedForwardHidden, SwigluFeedForwardUnit,
};
use trainable_candle_cuda::kernels::feed_forward_backward::{
    SWIGLU_FEED_FORWARD_BACKWARD, SWIGLU_FEED_FORWARD_SUMS, SwigluFeedForwardBackward, SwigluFeedForwardSums,
};

use super::{FeedForward, InnerGradients, Late, SWIGLU_FEED_FORWARD};
use crate::cuda::Gpu;
use crate::cuda::launch::{Address, Shape, address, count32, empty, input, optional_output, output, suffix};
use crate::ops::linear_group::LowRank;
use crate::ops::low_rank::{LowRanks, operand};
use crate::tape::BackwardContext;
use crate::{Error, Raw, Result, Tensor, checkpoint, compute};

const OP: &str = SWIGLU_FEED_FORWARD.name;
// The kernels fix all of these numbers except `FORWARD_COLUMNS`.

/// The rank that all three low-rank products must have.
const RANK: usize = 16;
/// Number of columns of the unit that a block computes in the backward pass.
const COLUMNS: usize = 256;
/// Number of rows that a block computes in the backward pass.
const ROWS: usize = 560;
/// Number of rows that a block computes in the forward pass.
const FORWARD_ROWS: usize = 128;
/// The maximum number of columns of the unit that a block computes in the forward pass.
const FORWARD_COLUMNS: usize = 2304;
/// Number of columns that a warp computes at a time.
const WARP_COLUMNS: usize = 32;
/// Bytes of shared memory of a block in the backward pass, as the kernel's file computes and asserts them.
const SHARED: u32 = 93184;
/// Addresses of the low-rank factors, and of buffers for their gradients, must be multiples of this.
const ALIGNMENT: Address = 16;

/// Whether the kernels support `x`, units of `width` columns, and `products`, the low-rank products of the features,
/// the gate and the outer map.
pub fn supports(x: &Tensor, width: usize, products: [&LowRank; 3]) -> Result<bool> {
    let is_half = matches!(x.dtype(), DType::F16 | DType::BF16);
    let has_rank = |product: &&LowRank| product.down.dims()[0] == RANK;
    if !is_half || x.elem_count() == 0 || !width.is_multiple_of(WARP_COLUMNS) || !products.iter().all(has_rank) {
        return Ok(false);
    }
    // The factors that the kernels read.
    for factor in [&products[0].up, &products[1].up, &products[2].down] {
        let factor = operand(factor, x.dtype())?.raw;
        if !factor.is_contiguous() || !address(OP, &factor)?.is_multiple_of(ALIGNMENT) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn missing() -> Error {
    Error::autograd(OP, "found no low-rank products for the kernels; please report this")
}

/// Returns the unit (rows, n), and the unit times the outer map's Aᵀ, (rows, 16). y (rows, 2 n) has the inner maps'
/// results without the products in `late`. The unit is `None` if nothing reads it, because a recomputation ends with
/// this operation.
pub fn forward(y: &Raw, late: Option<&Late<Raw>>, outer: &LowRanks<'_>) -> Result<(Option<Raw>, Raw)> {
    let (gpu, dtype, late) = (Gpu::of(OP, y)?, y.dtype(), late.ok_or_else(missing)?);
    let (rows, width) = (y.dims()[0], y.dims()[1] / 2);
    let unit = if checkpoint::ends_here() { None } else { Some(empty(OP, gpu, &[rows, width], dtype)?) };
    // As few blocks as possible share the columns of a row, about evenly and in multiples of `WARP_COLUMNS`.
    let fewest_blocks = width.div_ceil(FORWARD_COLUMNS);
    let columns = (width / WARP_COLUMNS).div_ceil(fewest_blocks) * WARP_COLUMNS;
    let column_blocks = width.div_ceil(columns);
    // Parts of the unit times Aᵀ, each over the columns of a block. The second kernel adds them up.
    let parts = empty(OP, gpu, &[column_blocks, rows, RANK], DType::F32)?;
    let [features, gate] = &late.products[..] else { return Err(missing()) };
    let arguments = SwigluFeedForwardUnit {
        x: input(OP, y)?,
        hidden: input(OP, &late.hidden)?,
        up_h: input(OP, &features.up)?,
        up_gate: input(OP, &gate.up)?,
        down: input(OP, &outer.operands()[0][0].raw)?, // A of the outer map
        unit: optional_output(OP, unit.as_ref())?,
        parts: output(OP, &parts)?,
        scale_h: features.scale as f32,
        scale_gate: gate.scale as f32,
        rows: count32(OP, rows)?,
        width: count32(OP, width)?,
        columns: count32(OP, columns)?,
    };
    let grid = [count32(OP, column_blocks)?, count32(OP, rows.div_ceil(FORWARD_ROWS))?, 1];
    let function = gpu.function(&SWIGLU_FEED_FORWARD_UNIT, suffix(OP, dtype)?)?;
    // SAFETY: the tensors are dense and of these sizes; `supports` has checked the sizes of the low-rank factors.
    unsafe { function.launch(OP, gpu, Shape { grid, block: [256, 1, 1], shared: 0 }, arguments) }?;
    let outer_hidden = empty(OP, gpu, &[rows, RANK], dtype)?;
    let count = outer_hidden.elem_count();
    let arguments = SwigluFeedForwardHidden {
        parts: input(OP, &parts)?,
        hidden: output(OP, &outer_hidden)?,
        count: count as u64,
        number: count32(OP, column_blocks)?,
    };
    let function = gpu.function(&SWIGLU_FEED_FORWARD_HIDDEN, suffix(OP, dtype)?)?;
    let elements_per_thread = 4;
    // SAFETY: the tensors are dense and of these sizes.
    unsafe { function.launch(OP, gpu, Shape::flat(count, elements_per_thread), arguments) }?;
    Ok((unit, outer_hidden))
}

/// The CUDA form of [`FeedForward::on_cpu`], with the same arguments and results, except that `unit_grad` does not
/// change. `unit_grad` is the part of the unit's gradient that comes through the outer map's base, and
/// `outer_hidden_grad` the gradient of the outer map's hidden values. Returns the gradients of the inner maps' results,
/// (rows, 2 n), and of their hidden values, (rows, 2 · 16). To the gradients in `context`, adds those of the three
/// factors that this part of the backward pass reads: B of the inner maps and A of the outer map.
pub fn backward(
    node: &FeedForward,
    context: &mut BackwardContext<'_>,
    unit_grad: &Raw,
    outer_hidden_grad: &Raw,
) -> Result<InnerGradients> {
    let (y, gpu, dtype) = (node.y.get()?, Gpu::of(OP, unit_grad)?, unit_grad.dtype());
    let (rows, width) = (unit_grad.dims()[0], unit_grad.dims()[1]);
    let late = node.late.as_ref().ok_or_else(missing)?.get()?;
    let down = node.outer.down_operand(0)?.ok_or_else(missing)?;
    let [features, gate] = &late.products[..] else { return Err(missing()) };
    let scales = [features.scale as f32, gate.scale as f32];
    let (column_blocks, row_blocks) = (width.div_ceil(COLUMNS), rows.div_ceil(ROWS));
    let grad = empty(OP, gpu, y.dims(), dtype)?;
    let hidden_grad = empty(OP, gpu, &[rows, 2 * RANK], dtype)?;
    // Parts of the factors' gradients, each over the rows of a block, and of `hidden_grad`, each over the columns of a
    // block. The second kernel adds them up.
    let factor_parts = empty(OP, gpu, &[row_blocks, 3, RANK * width], DType::F32)?;
    let hidden_parts = empty(OP, gpu, &[column_blocks, rows, 2 * RANK], DType::F32)?;
    let (rows32, width32) = (count32(OP, rows)?, count32(OP, width)?);
    let function = gpu.function(&SWIGLU_FEED_FORWARD_BACKWARD, suffix(OP, dtype)?)?;
    let grid = [count32(OP, column_blocks)?, count32(OP, row_blocks)?, 1];
    let arguments = SwigluFeedForwardBackward {
        x: input(OP, &y)?,
        grad: input(OP, unit_grad)?,
        dx: output(OP, &grad)?,
        hidden: input(OP, &late.hidden)?,
        last_hidden: input(OP, outer_hidden_grad)?, // the kernel calls the outer map the last one
        up_h: input(OP, &features.up)?,
        up_gate: input(OP, &gate.up)?,
        last_down: input(OP, &down)?,
        factor_parts: output(OP, &factor_parts)?,
        hidden_parts: output(OP, &hidden_parts)?,
        scale_h: scales[0],
        scale_gate: scales[1],
        rows: rows32,
        width: width32,
    };
    // SAFETY: the tensors are dense and of these sizes; `supports` has checked the sizes of the low-rank factors.
    unsafe { function.launch(OP, gpu, Shape { grid, block: [256, 1, 1], shared: SHARED }, arguments) }?;

    // The factors whose gradients the second kernel adds up: their indices among the inputs, and the shapes and dtypes
    // of the gradients.
    let factors = [
        (node.inner.up(0), [width, RANK], node.inner.dtypes(0)[1]),
        (node.inner.up(1), [width, RANK], node.inner.dtypes(1)[1]),
        (node.outer.down(0), [RANK, width], node.outer.dtypes(0)[0]),
    ];
    // For each factor: the tensor to which the kernel adds the gradient, and the variable's gradient buffer, if there
    // is one. The kernel adds to the buffer itself if the buffer is aligned, otherwise to zeros.
    let mut sums = Vec::with_capacity(factors.len());
    for (index, shape, _) in &factors {
        let buffer = context.buffer(*index, DType::F32);
        let is_in_place = match &buffer {
            Some(buffer) => address(OP, buffer)?.is_multiple_of(ALIGNMENT),
            None => false,
        };
        let sum = match &buffer {
            Some(buffer) if is_in_place => buffer.clone(),
            _ => compute::zeros(shape, DType::F32, unit_grad.device())?,
        };
        sums.push((sum, buffer, is_in_place));
    }
    let function = gpu.function(&SWIGLU_FEED_FORWARD_SUMS, suffix(OP, dtype)?)?;
    let arguments = SwigluFeedForwardSums {
        factor_parts: input(OP, &factor_parts)?,
        hidden_parts: input(OP, &hidden_parts)?,
        up_h: output(OP, &sums[0].0)?,
        up_gate: output(OP, &sums[1].0)?,
        last_down: output(OP, &sums[2].0)?,
        grad_hidden: output(OP, &hidden_grad)?,
        scale_h: scales[0],
        scale_gate: scales[1],
        rows: rows32,
        width: width32,
    };
    // The work is counted in groups of four elements, of one of the three factors' gradients or of `hidden_grad`. A
    // thread computes one group.
    let groups = (3 * RANK * width + 2 * RANK * rows) / 4;
    // SAFETY: the tensors are dense and of these sizes, and nothing else has the memory of the sums.
    unsafe { function.launch(OP, gpu, Shape::flat(groups, 1), arguments) }?;
    for ((index, _, grad_dtype), (sum, buffer, is_in_place)) in factors.into_iter().zip(sums) {
        match buffer {
            Some(_) if is_in_place => {}
            Some(buffer) => compute::accumulate(&buffer, &sum)?,
            None => context.add(index, compute::cast(&sum, grad_dtype)?)?,
        }
    }
    Ok((grad, hidden_grad))
}
