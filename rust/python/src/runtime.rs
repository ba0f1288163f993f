//! Settings and properties of the process: memory, CPU threads, and how matrix products are computed.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_core::compute::MatmulPrecision;

use crate::arguments::Integer;
use crate::error::Result;

/// Return the number of bytes that existing tapes save for backward passes: activations and the inputs of checkpoints.
/// A storage that several tensors share counts once. Parameters do not count.
///
/// ```python
/// x = tc.Var(tc.ones(1000))
/// y = x.exp()
/// assert tc.memory.saved_bytes() >= y.nbytes
/// ```
#[pyfunction]
pub fn saved_bytes() -> usize {
    tc::memory::saved_bytes()
}

/// Return the number of bytes of host memory that can still be allocated; None if the system does not report it.
///
/// ```python
/// free = tc.memory.available_bytes()
/// assert free is None or free > 0
/// ```
#[pyfunction]
pub fn available_bytes() -> Option<usize> {
    tc::memory::available_bytes()
}

/// Return the number of threads that compute on the CPU.
///
/// ```python
/// before = tc.get_num_threads()
/// tc.set_num_threads(1)
/// tc.set_num_threads(before)
/// ```
#[pyfunction]
pub fn get_num_threads() -> usize {
    tc::cpu::pool::num_threads()
}

/// Set the number of threads that compute on the CPU. Results do not depend on the number.
///
/// ```python
/// before = tc.get_num_threads()
/// tc.set_num_threads(1)
/// tc.set_num_threads(before)
/// ```
///
/// Raises:
///     ArgumentError: if `n` is not from 1 to 1024, or the system cannot start so many threads.
#[pyfunction]
pub fn set_num_threads(py: Python<'_>, n: Integer) -> Result<()> {
    let n = n.count("set_num_threads", "n")?;
    crate::call::detached(py, || tc::cpu::pool::set_num_threads(n))
}

/// Return the precision of products of f32 matrices on CUDA devices, "highest" or "high"; see
/// `set_float32_matmul_precision`.
///
/// ```python
/// tc.set_float32_matmul_precision("high")
/// assert tc.get_float32_matmul_precision() == "high"
/// tc.set_float32_matmul_precision("highest")
/// ```
#[pyfunction]
pub fn get_float32_matmul_precision() -> &'static str {
    match tc::compute::float32_matmul_precision() {
        MatmulPrecision::Highest => "highest",
        MatmulPrecision::High => "high",
    }
}

/// Set the precision of products of f32 matrices on CUDA devices, as torch's function of the same name does.
///
/// ```python
/// tc.set_float32_matmul_precision("high")
/// assert tc.get_float32_matmul_precision() == "high"
/// tc.set_float32_matmul_precision("highest")
/// ```
///
/// Args:
///     precision: "highest" for f32, the default; "high" for TF32, which is several times as fast on tensor cores, but
///         rounds both factors to a mantissa of 10 bits. The precision affects neither other dtypes nor the CPU.
///         Captured graphs keep the precision with which they were recorded.
///
/// Raises:
///     ArgumentError: if `precision` has another value.
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

/// Return whether linear layers with int8 or fp8 weights multiply the weights' 8-bit codes; see `set_w8a8`.
#[pyfunction]
pub fn get_w8a8() -> bool {
    tc::compute::uses_w8a8()
}

/// Choose whether linear layers with int8 or fp8 weights multiply the weights' 8-bit codes instead of the values that
/// the codes represent. GPUs multiply 8-bit numbers up to four times as fast as bf16, but rounding the activations and
/// gradients to 8 bits takes time.
///
/// Right before a product, the activations or gradients are rounded to the format of the weight. The scale of each row
/// of activations or gradients is the row's largest magnitude divided by 127 (int8) or 448 (fp8), as in torchao's
/// dynamic quantization. In the backward pass, the product sums over the rows of the weight, which have different
/// scales. So each element of a gradient is multiplied by the scale of its row of the weight before it is rounded. Sums
/// of int8 products are exact; sums of fp8 products are in f32.
///
/// Layers multiply values if their weights have other formats, if their numbers of features are not multiples of 16, or
/// if their inputs are f64. On a GPU, products of codes need compute capability 7.5 or higher for int8, and 8.9 or
/// higher for fp8; older GPUs multiply values.
///
/// Choose before a model is loaded: if layers multiply codes, loading SDXL's UNet in int8 or fp8 quantizes only the
/// layers of its feed-forward networks, because the products of its other layers are too small to gain speed.
///
/// Args:
///     enabled: whether layers multiply codes from now on. By default they multiply the values that codes represent.
///         Captured graphs keep the choice with which they were recorded.
#[pyfunction]
pub fn set_w8a8(enabled: bool) {
    tc::compute::set_w8a8(enabled);
}
