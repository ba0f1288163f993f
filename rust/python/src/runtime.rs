//! What the process has: threads, memory, the build.

use pyo3::prelude::*;
use trainable_candle_core as tc;

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
