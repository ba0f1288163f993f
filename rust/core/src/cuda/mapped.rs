//! Tensors whose memory is pinned memory of the host. Kernels of a device read and write them over the bus. Optimizers
//! can keep their states in such tensors, which take no memory of the device.
//!
//! Kernels, graphs and views treat these tensors as all other tensors of the device. Only copies to the host differ:
//! the host reads the memory itself ([`read`]).

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr};
use candle_core::{DType, Device, WithDType};
use trainable_candle_cuda::mapped;

use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::{Allocate, tensor_in};
use super::streaming::may_pin;
use crate::{Error, Raw, Result, capture};

/// Allocates the memory of a tensor on the host, pinned and mapped into the device's address space.
struct InHostMemory<'a> {
    op: &'static str,
    gpu: &'a Gpu,
}

impl Allocate for InHostMemory<'_> {
    fn allocate<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>> {
        let (op, bytes) = (self.op, count * size_of::<T>());
        let out_of_memory = || {
            let mib = bytes as f64 / (1u64 << 20) as f64;
            let message = format!(
                "the system gives no further {mib:.1} MiB of pinned memory for states of the optimizer; keep them in the memory of the \
                 device (states \"device\"), or use an 8-bit optimizer"
            );
            Error::OutOfMemory { op, message }
        };
        // A device without stream-ordered memory cannot have the tensor: there, dropping the slice would call another
        // function than the one that frees this memory.
        if !may_pin(bytes) || !self.gpu.stream().context().has_async_alloc() {
            return Err(out_of_memory());
        }
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(op, error))?;
        let address = mapped::allocate(bytes).map_err(|status| {
            if status.is_out_of_memory() || status.is_unpinnable() { out_of_memory() } else { status_error(op, status) }
        })?;
        // SAFETY: the memory has this many elements, all zero, which is a value of every dtype. Dropping the slice
        // frees it.
        Ok(unsafe { self.gpu.stream().upgrade_device_ptr(address, count) })
    }
}

/// Allocate a tensor of zeros in pinned memory of the host. Kernels of the device read and write it there.
///
/// # Errors
/// [`Error::OutOfMemory`] if the library's limit on pinned memory or the system allows no more of it, or if the device
/// has no stream-ordered memory; [`Error::DType`] if kernels do not support the dtype; [`Error::Device`] if `device`
/// is not a CUDA device, if a function is being captured, or if the driver reports an error.
pub fn zeros_on_host(op: &'static str, device: &Device, dims: &[usize], dtype: DType) -> Result<Raw> {
    let gpu = Gpu::of_device(op, device)?;
    // A graph cannot contain the allocation.
    capture::refuse(op)?;
    tensor_in(op, gpu, dims, dtype, &InHostMemory { op, gpu })
}

/// Reads the `count` elements of a contiguous tensor at `address`, after waiting for the queued work of the device.
/// Returns `None` if the tensor is empty or is not in memory that [`zeros_on_host`] has allocated; then the caller
/// copies from the device.
///
/// # Errors
/// [`Error::Device`] if the driver reports an error.
pub(super) fn read<T: WithDType>(op: &'static str, gpu: &Gpu, address: u64, count: usize) -> Option<Result<Vec<T>>> {
    if count == 0 || !mapped::owns(address) {
        return None;
    }
    let copy = || {
        gpu.stream().context().bind_to_thread().map_err(|error| driver_error(op, error))?;
        let mut values: Vec<T> = Vec::with_capacity(count);
        // SAFETY: the tensor and the capacity of `values` have `count` elements of the number type `T`, and the copy
        // writes all elements of `values`.
        unsafe {
            let to = values.as_mut_ptr().cast();
            mapped::read(to, address, count * size_of::<T>(), gpu.stream().cu_stream().cast())
                .map_err(|status| status_error(op, status))?;
            values.set_len(count);
        }
        Ok(values)
    };
    Some(copy())
}
