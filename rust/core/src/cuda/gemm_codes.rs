//! Matrix products of weights and inputs that are quantized to 8-bit codes, by cuBLASLt.

use super::gemm_lt::{alignment, run};
use super::gpu::Gpu;
use super::launch::Address;
use super::product_calls::{Arithmetic, Key};
use crate::Result;

/// The number format of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// 8-bit integers in two's complement.
    Int8,
    /// 8-bit floating-point numbers with four exponent bits and three fraction bits (e4m3).
    E4m3,
}

/// y (m, n) = x (m, k) times the transpose of w (n, k). All matrices are contiguous and row-major. The elements of `y`
/// are sums of products of codes: 32-bit integers for int8, f32 for e4m3. Returns false if cuBLASLt does not support
/// the product on this device.
///
/// # Safety
/// `x`, `w` and `y` are the addresses of matrices of these sizes on the device.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the device reports an error.
pub unsafe fn product_of_codes(
    op: &'static str,
    gpu: &Gpu,
    codes: Codes,
    [x, w, y]: [Address; 3],
    [m, n, k]: [usize; 3],
) -> Result<bool> {
    let key = Key {
        arithmetic: match codes {
            Codes::Int8 => Arithmetic::Int8,
            Codes::E4m3 => Arithmetic::E4m3,
        },
        sizes: [n, m, k],
        operands: [(true, k as i64), (false, k as i64)],
        alignments: [w, x, y].map(alignment),
    };
    // SAFETY: the caller's promise.
    unsafe { run(op, gpu, key, [w, x, y], None) }
}
