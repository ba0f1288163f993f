//! What the process has: threads, memory, the build.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_core::compute::MatmulPrecision;

use crate::arguments::Integer;
use crate::error::Result;

/// Bytes that the live tape keeps for backward passes: saved activations and the inputs of checkpoints, each storage
/// counted once; parameters are not counted.
#[pyfunction]
pub fn saved_bytes() -> usize {
    tc::memory::saved_bytes()
}

/// Bytes of host memory that can still be allocated, where the system tells.
#[pyfunction]
pub fn available_bytes() -> Option<usize> {
    tc::memory::available_bytes()
}

/// The number of threads that CPU work is spread over.
#[pyfunction]
pub fn get_num_threads() -> usize {
    tc::cpu::pool::num_threads()
}

/// Set the number of threads that CPU work is spread over. Results do not depend on it.
///
/// Raises:
///     ArgumentError: if `n` is 0, or the system refuses.
#[pyfunction]
pub fn set_num_threads(py: Python<'_>, n: Integer) -> Result<()> {
    let n = n.count("set_num_threads", "n")?;
    crate::call::detached(py, || tc::cpu::pool::set_num_threads(n))
}

/// How products of f32 matrices are computed on CUDA devices: "highest" or "high".
#[pyfunction]
pub fn get_float32_matmul_precision() -> &'static str {
    match tc::compute::float32_matmul_precision() {
        MatmulPrecision::Highest => "highest",
        MatmulPrecision::High => "high",
    }
}

/// Choose how products of f32 matrices are computed on CUDA devices, as torch's function of this name.
///
/// Args:
///     precision: "highest" for f32, the default; "high" for TF32, whose factors have 10 bits behind the point: several times as
///         fast on tensor cores. Other dtypes and the CPU know no choice.
///
/// Raises:
///     ArgumentError: if it is neither.
#[pyfunction]
pub fn set_float32_matmul_precision(precision: &str) -> Result<()> {
    let precision = match precision {
        "highest" => MatmulPrecision::Highest,
        "high" => MatmulPrecision::High,
        other => {
            let message = format!("found precision \"{other}\", expected \"highest\" or \"high\"");
            return Err(tc::Error::argument("set_float32_matmul_precision", message).into());
        }
    };
    tc::compute::set_float32_matmul_precision(precision);
    Ok(())
}
