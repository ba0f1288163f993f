//! Products with a bias by cuBLASLt, which adds the bias, and a residual, as it writes the result.

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;

use super::copy::contiguous;
use super::gemm::Matrix;
use super::gemm_lt::{alignment, run};
use super::gpu::Gpu;
use super::launch::{address, empty, same_device};
use super::product_calls::{Arithmetic, Extras, Key};
use crate::cpu::gemm::batch::Plan;
use crate::{Raw, Result};

/// Computes y (m, n) = x (m, k) times w (k, n) plus `bias` (n) in each row, plus `addend` (m, n); returns `None` if cuBLASLt does not support the
/// operands. All are added before the sum is rounded.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) if the shapes of `x` and `w` do not match,
/// [`Error::DType`](crate::Error::DType) if their dtypes differ, [`Error::Device`](crate::Error::Device) if the operands are
/// not on one CUDA device or cuBLASLt reports an error, [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the result does
/// not fit.
pub fn product_with_bias(op: &'static str, x: &Raw, w: &Raw, bias: &Raw, addend: Option<&Raw>) -> Result<Option<Raw>> {
    same_device(op, x, &[w, bias])?;
    addend.map_or(Ok(()), |addend| same_device(op, x, &[addend]))?;
    let plan = Plan::of(op, x, w)?;
    let matrices = (Matrix::transpose_of([plan.m, plan.k], plan.a), Matrix::transpose_of([plan.k, plan.n], plan.b));
    let (Some(left), Some(right)) = matrices else { return Ok(None) };
    if !matches!(x.dtype(), DType::F16 | DType::BF16 | DType::F32) || plan.m * plan.n * plan.k == 0 {
        return Ok(None);
    }
    let gpu = Gpu::of(op, x)?;
    let bias = contiguous(bias)?;
    let addend = addend.map(contiguous).transpose()?;
    let y = empty(op, gpu, &plan.dims, x.dtype())?;
    let [a, b, to, bias_at] = [address(op, w)?, address(op, x)?, address(op, &y)?, address(op, &bias)?];
    let addend_at = addend.as_ref().map(|addend| address(op, addend)).transpose()?;
    let operand = |matrix: Matrix| (matrix.operation == CUBLAS_OP_T, matrix.distance);
    let key = Key {
        arithmetic: Arithmetic::with_bias(x.dtype()),
        sizes: [plan.n, plan.m, plan.k],
        operands: [operand(right), operand(left)],
        distance: plan.n as i64,
        alignments: [a, b, to | bias_at | addend_at.unwrap_or(0)].map(alignment),
    };
    let extras = Extras { addend: addend_at, bias: Some(bias_at), scales: None };
    // SAFETY: the plan stays within its operands and the result; the addend has the result's size.
    let is_done = unsafe { run(op, gpu, key, [a, b, to], extras) }?;
    Ok(is_done.then_some(y))
}
