//! Matrix products with a bias by cuBLASLt, which adds the bias as it writes the result.

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;

use super::copy::contiguous;
use super::gemm::Matrix;
use super::gemm_lt::{alignment, run};
use super::gpu::Gpu;
use super::launch::{address, empty, same_device};
use super::product_calls::{Arithmetic, Extras, Key};
use crate::cpu::gemm::batch::Plan;
use crate::{Error, Raw, Result};

/// Computes y (m, n) = x (m, k) times w (k, n), plus `bias` (n) in each row. `x` and `w` are matrices: the caller has
/// merged batch dimensions with the rows of `x`. Returns `None` if a size is 0, the dtype is f64, a matrix has no
/// dimension of stride 1, or cuBLASLt does not support the product.
///
/// # Errors
/// [`Error::Shape`] if the shapes of `x`, `w` and `bias` do not match, [`Error::DType`] if their dtypes differ,
/// [`Error::Device`] if the operands are not on one CUDA device or cuBLASLt reports an error, [`Error::OutOfMemory`] if
/// the result does not fit into memory.
pub fn product_with_bias(op: &'static str, x: &Raw, w: &Raw, bias: &Raw) -> Result<Option<Raw>> {
    same_device(op, x, &[w, bias])?;
    let plan = Plan::of(op, x, w)?;
    if bias.dims() != [plan.n] {
        return Err(Error::shape(op, format!("the bias has shape {:?}, expected [{}]", bias.dims(), plan.n)));
    }
    if bias.dtype() != x.dtype() {
        let [found, expected] = [bias, x].map(|raw| raw.dtype().as_str());
        return Err(Error::dtype(op, format!("the bias is {found}, expected {expected}")));
    }
    // cuBLASLt's matrices are column-major: it computes yᵀ = wᵀ xᵀ, so it gets transposes, and w is its first operand.
    // `plan.a` and `plan.b` are the strides of x and w.
    let matrices = (Matrix::transpose_of([plan.m, plan.k], plan.a), Matrix::transpose_of([plan.k, plan.n], plan.b));
    let (Some(x_t), Some(w_t)) = matrices else { return Ok(None) };
    if !matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32) || plan.m * plan.n * plan.k == 0 {
        return Ok(None);
    }
    let gpu = Gpu::of(op, x)?;
    let bias = contiguous(bias)?;
    let y = empty(op, gpu, &plan.dims, x.dtype())?;
    let [w_at, x_at, y_at, bias_at] = [address(op, w)?, address(op, x)?, address(op, &y)?, address(op, &bias)?];
    // A `distance` is a leading dimension: the elements from one column of a matrix to the next.
    let operand = |matrix: Matrix| (matrix.operation == CUBLAS_OP_T, matrix.distance);
    let key = Key {
        arithmetic: Arithmetic::with_bias(x.dtype()),
        sizes: [plan.n, plan.m, plan.k],
        operands: [operand(w_t), operand(x_t)],
        // Columns of yᵀ follow one another without gaps.
        distance: plan.n as i64,
        // y and the bias have one entry: the alignment of their addresses combined by OR is the smaller of the two.
        alignments: [w_at, x_at, y_at | bias_at].map(alignment),
    };
    let extras = Extras { addend: None, bias: Some(bias_at), scales: None };
    // SAFETY: the key describes w, x and y, which are alive; the bias has n contiguous elements.
    let is_supported = unsafe { run(op, gpu, key, [w_at, x_at, y_at], extras) }?;
    Ok(is_supported.then_some(y))
}
