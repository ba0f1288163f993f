//! Converts errors of the driver, of cuBLAS and of candle to errors of the library.

use std::error::Error as StdError;

use candle_core::cuda_backend::CudaError;
use candle_core::cuda_backend::cudarc::cublas::sys as blas;
use candle_core::cuda_backend::cudarc::driver::DriverError;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use trainable_candle_cuda::memory::Status;

use crate::{Error, Result};

/// Converts the driver's error to an error of the library.
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

pub(super) fn check_blas(status: blas::cublasStatus_t) -> Result<()> {
    if status == blas::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::device("matmul", format!("cuBLAS reports {status:?}")))
}

/// Converts candle's CUDA error to an error of the library.
#[cold]
pub(crate) fn from_candle(error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<CudaError>() {
        Ok(error) => match *error {
            CudaError::Cuda(error) => driver_error("cuda", error),
            other => Error::device("cuda", other.to_string()),
        },
        Err(other) => Error::device("cuda", other.to_string()),
    }
}

/// Converts a status of the driver to an error of the library.
#[cold]
pub(super) fn status_error(op: &'static str, status: Status) -> Error {
    Error::device(op, format!("the NVIDIA driver reports error {}", status.0))
}
