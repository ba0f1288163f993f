//! Measures which of cuBLASLt's algorithms computes a large product fastest.
//!
//! cuBLAS picks an algorithm by a model of the GPU. On an H200 another one of those that it recommends was up to 20 % faster for the
//! products of SDXL. An algorithm is only taken if its result for the first operands equals that of cuBLAS' own choice bit by bit: then
//! the measured times, which differ from run to run, do not change results.

use std::sync::LazyLock;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::cublaslt::sys;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use half::{bf16, f16};

use super::download::download;
use super::error::driver_error;
use super::gpu::Gpu;
use super::launch::{Address, address, empty};
use super::product_calls::{Arithmetic, Key};
use super::profile::{self, Event};
use super::recorder;
use crate::{Raw, Result};

const OP: &str = "linear";
/// Multiplications from which a product is worth measuring: some microseconds of a large GPU.
const LARGE: usize = 1 << 29;
/// Bytes of the largest result that is computed a second time for the comparison.
const LARGEST_RESULT: usize = 64 << 20;
/// An algorithm replaces cuBLAS' choice if it takes at most this part of its time.
const WORTH: f64 = 0.97;
/// Of the algorithms that seem faster, this many are measured again.
const FINALISTS: usize = 3;

/// Whether products are measured; `TRAINABLE_CANDLE_CUDA_MEASURE=0` keeps cuBLAS' choices.
static IS_WANTED: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("TRAINABLE_CANDLE_CUDA_MEASURE").is_none_or(|value| value != "0"));

/// Whether the algorithm for a product should be measured, now or at its next call outside a recording.
pub(super) fn is_worth_measuring(key: &Key) -> bool {
    let Some(dtype) = half_dtype(key) else { return false };
    let [m, n, k] = key.sizes;
    *IS_WANTED && m * n * k >= LARGE && m * n * dtype.size_in_bytes() <= LARGEST_RESULT
}

/// Whether nothing prevents measuring at present: a recording forbids waiting, a profile pauses the GPU.
pub(super) fn can_measure() -> bool {
    !recorder::is_capturing_anywhere() && !profile::is_on()
}

fn half_dtype(key: &Key) -> Option<DType> {
    match key.arithmetic {
        Arithmetic::Half { dtype } | Arithmetic::Bias { dtype: dtype @ (DType::F16 | DType::BF16), .. } => Some(dtype),
        _ => None,
    }
}

/// The fastest of some algorithms for a product, if it is faster than cuBLAS' own choice and gives the same bits.
///
/// `own` queues the product with cuBLAS' choice, `other` with an algorithm; both write the result to the given address.
///
/// # Errors
/// The errors of `own`, and [`Error::Device`](crate::Error::Device) if the driver reports an error. Algorithms that fail are left out.
pub(super) fn fastest(
    gpu: &Gpu,
    key: &Key,
    algorithms: &[sys::cublasLtMatmulAlgo_t],
    own: impl Fn(Address) -> Result<()>,
    other: impl Fn(&sys::cublasLtMatmulAlgo_t, Address) -> Result<()>,
) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
    let Some(dtype) = half_dtype(key) else { return Ok(None) };
    let [m, n, _] = key.sizes;
    // Without memory for another result, cuBLAS' choice stays.
    let Ok(result) = empty(OP, gpu, &[m * n], dtype) else { return Ok(None) };
    let to = address(OP, &result)?;
    let limit = WORTH * time(gpu, 3, || own(to))?;
    let mut faster: Vec<(f64, &sys::cublasLtMatmulAlgo_t)> = algorithms
        .iter()
        .filter_map(|algorithm| Some((time(gpu, 3, || other(algorithm, to)).ok()?, algorithm)))
        .filter(|&(seconds, _)| seconds < limit)
        .collect();
    if faster.is_empty() {
        return Ok(None);
    }
    let by_time = |a: &(f64, _), b: &(f64, _)| a.0.total_cmp(&b.0);
    faster.sort_by(by_time);
    faster.truncate(FINALISTS);
    let limit = WORTH * time(gpu, 8, || own(to))?;
    for (seconds, algorithm) in &mut faster {
        *seconds = time(gpu, 8, || other(algorithm, to))?;
    }
    faster.sort_by(by_time);
    own(to)?;
    let expected = bits(&result)?;
    for (_, algorithm) in faster.into_iter().filter(|&(seconds, _)| seconds < limit) {
        other(algorithm, to)?;
        if bits(&result)? == expected {
            return Ok(Some(*algorithm));
        }
    }
    Ok(None)
}

/// The time of a call in milliseconds: the mean of `count` calls, after one that is not timed.
fn time(gpu: &Gpu, count: u32, call: impl Fn() -> Result<()>) -> Result<f64> {
    let failed = |error: DriverError| driver_error(OP, error);
    call()?;
    let begin = Event::now(gpu).map_err(failed)?;
    for _ in 0..count {
        call()?;
    }
    let end = Event::now(gpu).map_err(failed)?;
    gpu.stream().synchronize().map_err(failed)?;
    Ok(begin.until(&end).map_err(failed)? / f64::from(count))
}

fn bits(result: &Raw) -> Result<Vec<u16>> {
    if result.dtype() == DType::F16 {
        return Ok(download::<f16>(result)?.into_iter().map(f16::to_bits).collect());
    }
    Ok(download::<bf16>(result)?.into_iter().map(bf16::to_bits).collect())
}
