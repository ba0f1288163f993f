//! Memory of CUDA devices from the allocator of the crate `trainable-candle-cuda`, and the error when the memory runs
//! out.

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, DriverError};
use trainable_candle_cuda::memory;

use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::peers;
use crate::device::stats::MemoryStats;
use crate::{Error, Result, capture};

/// Allocates uninitialised memory for `count` elements. If there is not enough memory, the error names the shape
/// `dims`.
pub(super) fn allocate<T: DeviceRepr>(
    op: &'static str,
    gpu: &Gpu,
    count: usize,
    dims: &[usize],
) -> Result<CudaSlice<T>> {
    // SAFETY: the caller writes the memory before anything reads it.
    unsafe { gpu.stream().alloc::<T>(count) }.map_err(|error| {
        if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            out_of_memory(op, gpu, count * size_of::<T>(), dims)
        } else {
            driver_error(op, error)
        }
    })
}

/// The error for a tensor of shape `dims` that needs `bytes` bytes. Its message also says what the memory is used for.
#[cold]
fn out_of_memory(op: &'static str, gpu: &Gpu, bytes: usize, dims: &[usize]) -> Error {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let usage = stats(gpu).map_or_else(
        |_| String::new(),
        |stats| {
            let graphs = if stats.graphs > 0 {
                format!(" ({:.2} in captured graphs)", gib(stats.graphs))
            } else {
                String::new()
            };
            let limit = memory::limit(gpu.stream().context().cu_device());
            let limit = limit.map_or_else(String::new, |limit| format!("; the limit is {:.2} GiB", gib(limit)));
            format!(
                "{limit}; of the GPU's {:.2} GiB, {:.2} hold this process's tensors{graphs}, {:.2} are cached in blocks that are too \
                 small, {:.2} are free, and the rest is used by CUDA and other processes",
                gib(stats.total),
                gib(stats.allocated),
                gib(stats.reserved.saturating_sub(stats.allocated)),
                gib(stats.free),
            )
        },
    );
    let message = format!(
        "a tensor of shape {dims:?} needs {:.2} GiB{usage}; use a smaller batch, checkpointing, or an 8-bit optimizer",
        gib(bytes as u64)
    );
    Error::OutOfMemory { op, message }
}

fn stats(gpu: &Gpu) -> std::result::Result<MemoryStats, DriverError> {
    let context = gpu.stream().context();
    let (free, total) = context.mem_get_info()?;
    let counts = memory::stats(context.cu_device());
    Ok(MemoryStats {
        allocated: counts.allocated,
        peak_allocated: counts.peak_allocated,
        reserved: counts.reserved,
        peak_reserved: counts.peak_reserved,
        graphs: counts.graphs,
        allocations: counts.allocations,
        growths: counts.growths,
        retries: counts.retries,
        free: free as u64,
        total: total as u64,
    })
}

/// The memory statistics of the device.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device or the driver reports an error.
pub fn memory_stats(device: &Device) -> Result<MemoryStats> {
    const OP: &str = "memory_stats";
    stats(Gpu::of_device(OP, device)?).map_err(|error| driver_error(OP, error))
}

/// Set the peaks in the device's memory statistics to the present values.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    const OP: &str = "reset_peak_memory_stats";
    memory::reset_peaks(Gpu::of_device(OP, device)?.stream().context().cu_device());
    Ok(())
}

/// Limit the bytes of the device's memory that tensors and workspaces may take; None removes the limit.
///
/// # Errors
/// As [`memory_stats`].
pub fn set_memory_limit(device: &Device, limit: Option<u64>) -> Result<()> {
    memory::set_limit(Gpu::of_device("set_memory_limit", device)?.stream().context().cu_device(), limit);
    Ok(())
}

/// The name of the device's model, such as `NVIDIA H200`.
///
/// # Errors
/// As [`memory_stats`].
pub fn device_name(device: &Device) -> Result<String> {
    const OP: &str = "device_name";
    Gpu::of_device(OP, device)?.stream().context().name().map_err(|error| driver_error(OP, error))
}

/// Release the device's cached memory to other processes; returns the number of bytes that were released.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, if a graph is being captured, or if the driver reports an error.
pub fn empty_cache(device: &Device) -> Result<u64> {
    const OP: &str = "empty_cache";
    let gpu = Gpu::of_device(OP, device)?;
    capture::refuse(OP)?;
    let context = gpu.stream().context();
    // Frees the shards of streamed weights that no process maps any more.
    peers::sweep();
    context.bind_to_thread().map_err(|error| driver_error(OP, error))?;
    memory::trim(context.cu_device()).map_err(|status| status_error(OP, status))
}

/// Wait until all work queued on the device is done.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, if a graph is being captured, or if a kernel failed;
/// [`Error::Index`] if a kernel has found an id out of range.
pub fn synchronize(device: &Device) -> Result<()> {
    const OP: &str = "synchronize";
    let gpu = Gpu::of_device(OP, device)?;
    capture::refuse(OP)?;
    gpu.stream().synchronize().map_err(|error| driver_error(OP, error))?;
    // The board is device memory to which kernels report ids that are out of range.
    gpu.board().check()
}
