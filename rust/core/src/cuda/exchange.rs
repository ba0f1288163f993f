//! Orders the work of this library and of libraries with which it shares memory by DLPack. Those libraries queue their
//! work in streams of their own. A *consumer* is a library that uses this library's tensors. A variable or argument
//! `consumer` is the handle of the consumer's stream.

use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::{CUevent_flags, CUevent_wait_flags, CUstream};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};
use candle_core::{DType, Device, Layout, Shape};

use super::copy::copy_bytes;
use super::error::driver_error;
use super::gpu::Gpu;
use super::launch::{self, empty};
use super::recorder::is_capturing_anywhere;
use super::strided::Member;
use crate::{Raw, Result, capture};

const OP: &str = "dlpack";

/// Returns the address of a tensor's first element.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the tensor is not on a CUDA device,
/// [`Error::DType`](crate::Error::DType) if kernels do not support its dtype.
pub fn address(tensor: &Raw) -> Result<u64> {
    launch::address(OP, tensor)
}

/// Returns the driver's handle of the stream in which this library queues its work on a device.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if `device` is not a CUDA device.
pub fn stream(device: &Device) -> Result<usize> {
    Ok(Gpu::of_device(OP, device)?.stream().cu_stream() as usize)
}

/// Makes the stream `second` wait for the work that is queued in the stream `first` now.
///
/// # Safety
/// Both are streams of the current device.
unsafe fn order(first: CUstream, second: CUstream) -> std::result::Result<(), DriverError> {
    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
    // SAFETY: the event was just made; it may be destroyed while a stream waits for it.
    unsafe {
        let ordered = result::event::record(event, first)
            .and_then(|()| result::stream::wait_event(second, event, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT));
        result::event::destroy(event)?;
        ordered
    }
}

/// Makes the consumer's stream wait until all work that this library has queued on the device is done.
///
/// # Safety
/// `consumer` is the handle of a stream of the device, 1 for the legacy default stream, or 2 for the per-thread default
/// stream.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if `device` is not a CUDA device, inside a captured function, or if the
/// driver reports an error.
pub unsafe fn ready_for(device: &Device, consumer: usize) -> Result<()> {
    let gpu = Gpu::of_device(OP, device)?;
    // Returns an error inside a captured function.
    capture::refuse(OP)?;
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
    // SAFETY: the caller's promise.
    unsafe { order(gpu.stream().cu_stream(), consumer as CUstream) }.map_err(|error| driver_error(OP, error))
}

/// Tensors that consumers have released during a capture, each with the consumer's stream if it is known. They are kept
/// until the next release outside of a capture, because captured work cannot wait for another library's stream.
static DEFERRED: Mutex<Vec<(Raw, Option<usize>)>> = Mutex::new(Vec::new());

/// Drops a tensor that a consumer no longer uses, after the work that the consumer has queued. `consumer` is the
/// consumer's stream, as in [`ready_for`], if it is known. Unless that stream is the legacy default stream, the call
/// waits for the device. During a capture, the tensor is kept until a later release.
pub fn released(tensor: Raw, consumer: Option<usize>) {
    let mut waiting = std::mem::take(&mut *DEFERRED.lock().unwrap_or_else(PoisonError::into_inner));
    waiting.push((tensor, consumer));
    if is_capturing_anywhere() {
        DEFERRED.lock().unwrap_or_else(PoisonError::into_inner).append(&mut waiting);
        return;
    }
    for (tensor, consumer) in waiting {
        // Errors are ignored: a device that has failed reports the error on the next call.
        let _ = wait_for(tensor.device(), consumer);
    }
}

/// Makes this library's stream wait for the stream `consumer` if that is the legacy default stream. Otherwise makes the
/// host wait for all work of the device.
fn wait_for(device: &Device, consumer: Option<usize>) -> Result<()> {
    const LEGACY: usize = 1;
    let gpu = Gpu::of_device(OP, device)?;
    let context = gpu.stream().context();
    let wait = || {
        context.bind_to_thread()?;
        match consumer {
            // SAFETY: the default stream always exists.
            Some(LEGACY) => unsafe { order(LEGACY as CUstream, gpu.stream().cu_stream()) },
            // Any other stream may have been destroyed, so nothing can be queued in it: wait for the whole device.
            _ => context.synchronize(),
        }
    };
    wait().map_err(|error| driver_error(OP, error))
}

/// Copies another library's tensor to a new tensor. Before the call, the caller must make this library's stream wait
/// until the values are written. Returns after all values were read.
///
/// # Safety
/// Every element that `dims` and `strides` (in elements) reach from `address` is readable on the device, and has the
/// dtype `dtype`.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the copy does not fit into memory,
/// [`Error::Shape`](crate::Error::Shape) if more dimensions than kernels support remain after neighbouring dimensions
/// are merged where their strides allow it, [`Error::DType`](crate::Error::DType) if kernels do not support the dtype,
/// and [`Error::Device`](crate::Error::Device) as [`ready_for`].
pub unsafe fn copy(device: &Device, address: u64, dims: &[usize], strides: &[usize], dtype: DType) -> Result<Raw> {
    let gpu = Gpu::of_device(OP, device)?;
    capture::refuse(OP)?;
    let y = empty(OP, gpu, dims, dtype)?;
    if y.elem_count() == 0 {
        return Ok(y);
    }
    let layout = Layout::new(Shape::from(dims), strides.to_vec(), 0);
    let from = Member { layout: &layout, address, dtype };
    // SAFETY: the caller promises that all elements of the source are readable; `y` has the same shape.
    unsafe { copy_bytes(OP, gpu, dims, Member::new(OP, &y)?, from) }?;
    gpu.stream().synchronize().map_err(|error| driver_error(OP, error))?;
    Ok(y)
}
