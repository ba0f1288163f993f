//! Memory of CUDA devices. The driver's pool keeps freed memory for the next allocation and hands it out in the stream's order.

use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::sys::{CUmemoryPool, CUresult};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, DeviceRepr, DriverError, result};

use super::gpu::{Gpu, driver_error};
use crate::device::MemoryStats;
use crate::{Error, Result};

fn pool(context: &Arc<CudaContext>) -> std::result::Result<CUmemoryPool, DriverError> {
    context.bind_to_thread()?;
    // SAFETY: the context's device exists.
    unsafe { result::device::get_default_mem_pool(context.cu_device()) }
}

fn set(context: &Arc<CudaContext>, attribute: Attribute, mut value: u64) -> std::result::Result<(), DriverError> {
    // SAFETY: these attributes are of 64 bits.
    unsafe { result::mem_pool::set_attribute(pool(context)?, attribute, std::ptr::from_mut(&mut value).cast()) }
}

fn get(context: &Arc<CudaContext>, attribute: Attribute) -> std::result::Result<u64, DriverError> {
    let mut value = 0u64;
    // SAFETY: as above.
    unsafe { result::mem_pool::get_attribute(pool(context)?, attribute, std::ptr::from_mut(&mut value).cast()) }?;
    Ok(value)
}

/// Freed memory stays in the pool: without this the driver gives it back at every synchronisation.
pub(super) fn keep_freed_memory(context: &Arc<CudaContext>) -> Result<()> {
    set(context, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX).map_err(|error| driver_error("cuda", error))
}

/// Memory for `count` elements, not set. When there is none left, what the pool keeps is given back first.
pub(super) fn allocate<T: DeviceRepr>(
    op: &'static str,
    gpu: &Gpu,
    count: usize,
    dims: &[usize],
) -> Result<CudaSlice<T>> {
    // SAFETY: the caller writes it before it is read.
    let attempt = || unsafe { gpu.stream().alloc::<T>(count) };
    let full = |error: &DriverError| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    attempt()
        .or_else(|error| {
            if !full(&error) {
                return Err(error);
            }
            gpu.stream().synchronize()?;
            // SAFETY: the pool is the device's; memory in use stays.
            unsafe { result::mem_pool::trim_to(pool(gpu.stream().context())?, 0) }?;
            attempt()
        })
        .map_err(|error| {
            if full(&error) { out_of_memory(op, gpu, count * size_of::<T>(), dims) } else { driver_error(op, error) }
        })
}

#[cold]
fn out_of_memory(op: &'static str, gpu: &Gpu, bytes: usize, dims: &[usize]) -> Error {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let held = stats(gpu.stream().context()).map_or_else(
        |_| String::new(),
        |stats| {
            format!(
                "; the GPU has {:.2} GiB, of which {:.2} are free and {:.2} hold this process's tensors",
                gib(stats.total),
                gib(stats.free),
                gib(stats.allocated)
            )
        },
    );
    let message = format!(
        "a tensor of shape {dims:?} needs {:.2} GiB{held}; use a smaller batch, checkpointing, or an 8-bit optimizer",
        gib(bytes as u64)
    );
    Error::OutOfMemory { op, message }
}

fn stats(context: &Arc<CudaContext>) -> std::result::Result<MemoryStats, DriverError> {
    let (free, total) = context.mem_get_info()?;
    Ok(MemoryStats {
        allocated: get(context, Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        peak_allocated: get(context, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        reserved: get(context, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        peak_reserved: get(context, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
        free: free as u64,
        total: total as u64,
    })
}

/// What the device holds.
///
/// # Errors
/// [`Error::Device`] if it is not a CUDA device or the driver refuses.
pub fn memory_stats(device: &Device) -> Result<MemoryStats> {
    const OP: &str = "memory_stats";
    stats(Gpu::of_device(OP, device)?.stream().context()).map_err(|error| driver_error(OP, error))
}

/// Start counting the peaks anew, from what is held now.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    const OP: &str = "reset_peak_memory_stats";
    let context = Gpu::of_device(OP, device)?.stream().context();
    set(context, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
        .and_then(|()| set(context, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0))
        .map_err(|error| driver_error(OP, error))
}

/// Wait until all work queued on the device is done.
///
/// # Errors
/// [`Error::Device`] if it is not a CUDA device, or a kernel failed.
pub fn synchronize(device: &Device) -> Result<()> {
    const OP: &str = "synchronize";
    Gpu::of_device(OP, device)?.stream().synchronize().map_err(|error| driver_error(OP, error))
}
