//! Matrix products by cuBLASLt of inputs and weights whose elements are 8-bit codes.

use candle_core::DType;

use super::gemm_lt::{alignment, run};
use super::gpu::Gpu;
use super::launch::Address;
use super::product_calls::{Arithmetic, Extras, Key};
use crate::Result;

/// The number format of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// 8-bit integers in two's complement.
    Int8,
    /// 8-bit floating-point numbers with four exponent bits and three fraction bits (e4m3).
    E4m3,
}

/// Computes y (m, n) = x (m, k) times the transpose of w (n, k), where x and w are matrices of codes. All matrices are
/// contiguous and row-major. The elements of y are sums of products of codes: 32-bit integers for int8, f32 for e4m3.
/// Returns false if cuBLASLt does not support the product on this device.
///
/// # Safety
/// `x`, `w` and `y` are the addresses of matrices of these sizes on the device.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if cuBLASLt or the driver reports an error.
pub unsafe fn product_of_codes(
    op: &'static str,
    gpu: &Gpu,
    codes: Codes,
    [x, w, y]: [Address; 3],
    [m, n, k]: [usize; 3],
) -> Result<bool> {
    // cuBLASLt takes all matrices as column-major. It computes yᵀ = w xᵀ, where it reads x as xᵀ (k, m), and reads w as
    // wᵀ (k, n), which it transposes.
    let key = Key {
        arithmetic: match codes {
            Codes::Int8 => Arithmetic::Int8,
            Codes::E4m3 => Arithmetic::E4m3,
        },
        sizes: [n, m, k],
        // For w and for x: whether it is transposed, and the distance between its columns as cuBLASLt reads it.
        operands: [(true, k as i64), (false, k as i64)],
        // The distance between the columns of yᵀ.
        distance: n as i64,
        alignments: [w, x, y].map(alignment),
    };
    // SAFETY: the caller's promise.
    unsafe { run(op, gpu, key, [w, x, y], Extras::default()) }
}

/// What [`scaled_product_of_codes`] reads and writes. The vectors of scales are f32.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    /// The codes of x (m, k), contiguous.
    pub x: Address,
    /// The scales of the rows of x (m).
    pub x_scales: Address,
    /// The codes of w (n, k), contiguous.
    pub w: Address,
    /// The scales of the rows of w (n).
    pub w_scales: Address,
    /// The bias (n) in the dtype of the result.
    pub bias: Option<Address>,
    /// A matrix (m, n) in the dtype of the result. The distance between its rows is that of the result.
    pub addend: Option<Address>,
    /// The result (m, n).
    pub y: Address,
    /// The distance between rows of the result, in elements.
    pub stride: usize,
    /// Whether sums may have about 14 significant bits instead of the 24 of f32, which takes less time.
    pub is_fast: bool,
}

/// Computes y (m, n) = x (m, k) times the transpose of w (n, k), where x and w are matrices of e4m3 codes. Row i of the
/// product is multiplied by element i of `x_scales`, and column j by element j of `w_scales`; then `bias` is added to
/// each row, and `addend` to the whole matrix. `dtype` is that of the result. Sums are in f32 unless
/// [`is_fast`](Scaled::is_fast). Returns false if `dtype` is neither f16 nor bf16, the GPU is not of compute capability
/// 9.0, or cuBLASLt does not support the product.
///
/// Source: <https://docs.nvidia.com/cuda/cublas/#outer-vector-scaling-for-fp8-data-types>
///
/// # Safety
/// The addresses are those of matrices and vectors of these sizes and types on the device.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if cuBLASLt or the driver reports an error.
pub unsafe fn scaled_product_of_codes(
    op: &'static str,
    gpu: &Gpu,
    operands: Scaled,
    [m, n, k]: [usize; 3],
    dtype: DType,
) -> Result<bool> {
    let Scaled { x, x_scales, w, w_scales, bias, addend, y, stride, is_fast } = operands;
    if !gpu.runs_hopper_kernels() || !matches!(dtype, DType::F16 | DType::BF16) {
        return Ok(false);
    }
    // The operands are as in `product_of_codes`.
    let key = Key {
        arithmetic: Arithmetic::ScaledE4m3 { dtype, has_bias: bias.is_some(), is_fast },
        sizes: [n, m, k],
        operands: [(true, k as i64), (false, k as i64)],
        distance: stride as i64,
        // y, the bias and the addend share one entry, the smallest of their alignments: the OR of their addresses has
        // this alignment.
        alignments: [w, x, y | bias.unwrap_or(0) | addend.unwrap_or(0)].map(alignment),
    };
    // SAFETY: the caller's promise.
    unsafe { run(op, gpu, key, [w, x, y], Extras { addend, bias, scales: Some([w_scales, x_scales]) }) }
}
