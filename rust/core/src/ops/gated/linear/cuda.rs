//! The CUDA form of gated units (SwiGLU) of linear maps with LoRA. A row of the maps' results has two halves: the
//! features, then the gate. The kernels (`kernels/gated_low_rank.cu`) also compute the low-rank products, and add them
//! to the halves.

use candle_core::DType;
use trainable_candle_cuda::kernels::gated_low_rank::{SwigluLowRank16Backward, SwigluLowRank16Forward};
use trainable_candle_cuda::structs::{LowRankHalf, LowRankHalves};

use super::{Late, SWIGLU_LINEAR_GROUP};
use crate::cuda::Gpu;
use crate::cuda::launch::{Shape, address, count32, empty, input, output, suffix};
use crate::ops::low_rank::LastProduct;
use crate::{Raw, Result};

/// Number of columns of the result that a block of threads computes; also its number of threads.
const BLOCK: usize = 256;
/// Number of columns of the result that a warp computes.
const WARP_COLUMNS: usize = 32;
/// Number of rows that a block of threads computes.
const ROWS: usize = 128;

/// Whether the kernels support units of `width` columns in `dtype` with these late products (see [`forward`]). `dtype`
/// must be f16 or bf16, and `width` a multiple of 32. There must be at least one product. Each must be for the features
/// or for the gate, which have `width` columns each, and have a contiguous B. All must have the same rank: 16, 32 or
/// 64.
pub fn supports<'a>(dtype: DType, width: usize, products: impl Iterator<Item = LastProduct<&'a Raw>>) -> bool {
    let mut rank = None;
    let mut count = 0;
    let fits = products.into_iter().all(|product| {
        let [first_column, columns] = product.columns;
        let [_, product_rank] = product.ranks;
        count += 1;
        columns == width
            && (first_column == 0 || first_column == width)
            && matches!(product_rank, 16 | 32 | 64)
            && *rank.get_or_insert(product_rank) == product_rank
            && product.up.is_contiguous()
    });
    fits && count > 0 && matches!(dtype, DType::F16 | DType::BF16) && width.is_multiple_of(WARP_COLUMNS)
}

/// Applies the gated unit to the sum of y (rows, 2 n) and the late products: those that are not added to y yet. The
/// result is (rows, n). To the kernel, `x` is y, and `y` is the result.
pub fn forward(y: &Raw, late: &Late<Raw>) -> Result<Raw> {
    let op = SWIGLU_LINEAR_GROUP.name;
    let (gpu, rows, columns) = (Gpu::of(op, y)?, y.dims()[0], y.dims()[1]);
    let result = empty(op, gpu, &[rows, columns / 2], y.dtype())?;
    if result.elem_count() > 0 {
        let (name, halves, shape) = prepare(late, rows, columns / 2)?;
        let function = gpu.named(&name, "_forward", suffix(op, y.dtype())?)?;
        let (rows, width) = (count32(op, rows)?, count32(op, columns / 2)?);
        // The kernels of all ranks have the same parameters, so the structure for rank 16 serves for each.
        let arguments = SwigluLowRank16Forward { x: input(op, y)?, y: output(op, &result)?, halves, rows, width };
        // SAFETY: the tensors are dense and of these sizes; `supports` has checked the sizes of the products.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(result)
}

/// Computes the gradient of the sum of y and the late products, (rows, 2 n), from `grad`, the gradient of the unit's
/// result, (rows, n).
pub fn backward(y: &Raw, grad: &Raw, late: &Late<Raw>) -> Result<Raw> {
    let op = SWIGLU_LINEAR_GROUP.name;
    let (gpu, width) = (Gpu::of(op, y)?, grad.dims()[1]);
    let grad_sum = empty(op, gpu, y.dims(), y.dtype())?;
    if grad_sum.elem_count() > 0 {
        let (name, halves, shape) = prepare(late, grad.dims()[0], width)?;
        let function = gpu.named(&name, "_backward", suffix(op, y.dtype())?)?;
        let (rows, width) = (count32(op, grad.dims()[0])?, count32(op, width)?);
        let (x, grad, dx) = (input(op, y)?, input(op, grad)?, output(op, &grad_sum)?);
        // The kernels of all ranks have the same parameters, so the structure for rank 16 serves for each.
        let arguments = SwigluLowRank16Backward { x, grad, dx, halves, rows, width };
        // SAFETY: as in `forward`.
        unsafe { function.launch(op, gpu, shape, arguments) }?;
    }
    Ok(grad_sum)
}

/// Returns the kernel's name without `_forward` or `_backward`, its argument for the products, and the launch shape.
/// The result of the unit has `rows` rows and `width` columns. `late.hidden` has x Aᵀ of all adapters side by side;
/// `ranks` of a product is the first of its columns there, and their number.
fn prepare(late: &Late<Raw>, rows: usize, width: usize) -> Result<(String, LowRankHalves, Shape)> {
    let op = SWIGLU_LINEAR_GROUP.name;
    // The features and the gate. A half without a product keeps null addresses.
    let mut halves = [LowRankHalf::default(); 2];
    let mut rank = 0; // the rank of all products
    for LastProduct { up, columns: [first_column, _], ranks: [first_rank, product_rank], scale } in &late.products {
        rank = *product_rank;
        halves[*first_column / width] = LowRankHalf {
            hidden: address(op, &late.hidden.narrow(1, *first_rank, rank)?)?,
            up: address(op, up)?,
            // The distances between neighbouring rows, in elements.
            hidden_row: count32(op, late.hidden.dims()[1])?,
            up_row: count32(op, rank)?,
            scale: *scale as f32,
            unused: 0,
        };
    }
    let grid = [count32(op, width.div_ceil(BLOCK))?, count32(op, rows.div_ceil(ROWS))?, 1];
    let shape = Shape { grid, block: [BLOCK as u32, 1, 1], shared: 0 };
    Ok((format!("swiglu_low_rank{rank}"), LowRankHalves { list: halves }, shape))
}
