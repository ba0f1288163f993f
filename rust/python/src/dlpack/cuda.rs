//! DLPack on CUDA devices: the streams of consumers, and copies of producers' data.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
pub use tc::cuda::exchange as engine;
use tc::{DType, Device, Raw};
use trainable_candle_core as tc;

use super::OP;
use crate::error::Result;
use crate::tensor::source::{Element, Source};

/// The stream that the protocol assumes if none is given: CUDA's legacy default stream.
const LEGACY: i64 = 1;

/// The stream that a consumer names with the argument `stream` of `__dlpack__`: the address of a stream, or 1 or 2 for
/// CUDA's legacy or per-thread default stream. `None` for -1: the consumer then synchronizes by itself.
///
/// # Errors
/// `BufferError` for 0 and for numbers below -1, which the protocol does not allow.
pub fn consumer(stream: Option<i64>) -> PyResult<Option<usize>> {
    match stream.unwrap_or(LEGACY) {
        -1 => Ok(None),
        stream if stream > 0 => Ok(Some(stream as usize)),
        other => Err(PyBufferError::new_err(format!(
            "dlpack: stream is {other}, expected -1, 1, 2 or the address of a CUDA stream"
        ))),
    }
}

/// The number of a CUDA device; 0 for another device.
pub fn ordinal(device: &Device) -> i32 {
    match device.location() {
        tc::DeviceLocation::Cuda { gpu_id } => gpu_id as i32,
        _ => 0,
    }
}

/// The dtype of a tensor with elements of this type; `None` if no dtype has the same representation.
fn dtype(element: Element) -> Option<DType> {
    Some(match element {
        // A bool is one byte, 0 or 1.
        Element::Bool | Element::U8 => DType::U8,
        Element::U32 => DType::U32,
        Element::I64 => DType::I64,
        Element::F16 => DType::F16,
        Element::BF16 => DType::BF16,
        Element::F32 => DType::F32,
        Element::F64 => DType::F64,
        Element::I8 | Element::I16 | Element::I32 | Element::U16 => return None,
    })
}

/// Return a copy of the values of `source`, on the same device. The stream in which this library copies them must
/// already wait until the producer has written them; a producer ensures this when `__dlpack__` gets this stream.
///
/// # Safety
/// Every element that the source's dims and strides reach is readable on the device.
///
/// # Errors
/// `DTypeError` if no dtype has the representation of the elements, `ShapeError` if a stride is negative or the
/// dimensions are too many, `OutOfMemoryError` if the copy does not fit into memory, `DeviceError` if the driver
/// reports an error.
pub unsafe fn read(source: &Source, device: &Device) -> Result<Raw> {
    let Some(dtype) = dtype(source.element) else {
        let message = format!("{:?} elements on a GPU cannot be imported; convert them to int64 first", source.element);
        return Err(tc::Error::dtype(OP, message).into());
    };
    // `source` has strides in bytes; the copy takes strides in elements.
    let size = source.element.size() as isize;
    let strides: std::result::Result<Vec<usize>, _> =
        source.strides.iter().map(|stride| usize::try_from(stride / size)).collect();
    let Ok(strides) = strides else {
        return Err(tc::Error::shape(OP, "a stride is negative; make the data contiguous first").into());
    };
    // SAFETY: the caller ensures that all elements are readable.
    Ok(unsafe { engine::copy(device, source.data as u64, &source.dims, &strides, dtype) }?)
}
