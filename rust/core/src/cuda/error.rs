//! Converts errors of the driver, of cuBLAS and of candle to this library's errors.

use std::error::Error as StdError;

use candle_core::cuda_backend::CudaError;
use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use trainable_candle_cuda::memory::Status;

use crate::{Error, Result};

/// Converts an error of the driver that cudarc has returned.
#[cold]
pub(super) fn driver_error(op: &'static str, error: DriverError) -> Error {
    if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return Error::OutOfMemory {
            op,
            message: "the GPU has no memory left; use a smaller batch, checkpointing, or an 8-bit optimizer".to_owned(),
        };
    }
    if error.0 == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED {
        return Error::device(
            op,
            "a captured function cannot contain this operation; run the operation before or after the function",
        );
    }
    Error::device(op, format!("the NVIDIA driver reports: {error}"))
}

/// Returns the status of a call of cuBLAS as an error, unless it is a success.
pub(super) fn check_blas(status: blas::cublasStatus_t) -> Result<()> {
    if status == blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::device("matmul", format!("cuBLAS reports {status:?}")))
}

/// Converts an error of candle's CUDA backend.
#[cold]
pub(crate) fn from_candle(error: Box<dyn StdError + Send + Sync>) -> Error {
    const OP: &str = "cuda";
    match error.downcast::<CudaError>() {
        Ok(error) => match *error {
            CudaError::Cuda(error) => driver_error(OP, error),
            other => Error::device(OP, other.to_string()),
        },
        Err(other) => Error::device(OP, other.to_string()),
    }
}

/// Converts an error of the driver that the crate `trainable_candle_cuda` has returned as a status.
#[cold]
pub(super) fn status_error(op: &'static str, status: Status) -> Error {
    Error::device(op, format!("the NVIDIA driver reports error {}", status.0))
}
