//! Memory of CUDA devices from the allocator of the crate `trainable-candle-cuda`, and the error when it runs out.

use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, DriverError};
use candle_core::{Device, WithDType};
use trainable_candle_cuda::download;
use trainable_candle_cuda::memory::{self, Status};

use super::copy::contiguous;
use super::gpu::{Gpu, driver_error};
use super::launch::address;
use crate::device::MemoryStats;
use crate::{Error, Raw, Result, capture};

/// Memory for `count` elements, not set.
pub(super) fn allocate<T: DeviceRepr>(
    op: &'static str,
    gpu: &Gpu,
    count: usize,
    dims: &[usize],
) -> Result<CudaSlice<T>> {
    // SAFETY: the caller writes it before it is read.
    unsafe { gpu.stream().alloc::<T>(count) }.map_err(|error| {
        if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            out_of_memory(op, gpu, count * size_of::<T>(), dims)
        } else {
            driver_error(op, error)
        }
    })
}

#[cold]
fn out_of_memory(op: &'static str, gpu: &Gpu, bytes: usize, dims: &[usize]) -> Error {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let held = stats(gpu).map_or_else(
        |_| String::new(),
        |stats| {
            let graphs = if stats.graphs > 0 {
                format!(" ({:.2} in captured graphs)", gib(stats.graphs))
            } else {
                String::new()
            };
            format!(
                "; of the GPU's {:.2} GiB, {:.2} hold this process's tensors{graphs}, {:.2} are kept for later in pieces too small, \
                 {:.2} are free, and the rest is used by CUDA and other processes",
                gib(stats.total),
                gib(stats.allocated),
                gib(stats.reserved.saturating_sub(stats.allocated)),
                gib(stats.free),
            )
        },
    );
    let message = format!(
        "a tensor of shape {dims:?} needs {:.2} GiB{held}; use a smaller batch, checkpointing, or an 8-bit optimizer",
        gib(bytes as u64)
    );
    Error::OutOfMemory { op, message }
}

/// A status of the driver as the library's error.
#[cold]
pub(super) fn status_error(op: &'static str, status: Status) -> Error {
    Error::device(op, format!("the NVIDIA driver reports error {}", status.0))
}

fn stats(gpu: &Gpu) -> std::result::Result<MemoryStats, DriverError> {
    let context = gpu.stream().context();
    let (free, total) = context.mem_get_info()?;
    let held = memory::stats(context.cu_device());
    Ok(MemoryStats {
        allocated: held.allocated,
        peak_allocated: held.peak_allocated,
        reserved: held.reserved,
        peak_reserved: held.peak_reserved,
        graphs: held.graphs,
        allocations: held.allocations,
        growths: held.growths,
        retries: held.retries,
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
    stats(Gpu::of_device(OP, device)?).map_err(|error| driver_error(OP, error))
}

/// Reset the peaks to the memory in use now.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    const OP: &str = "reset_peak_memory_stats";
    memory::reset_peaks(Gpu::of_device(OP, device)?.stream().context().cu_device());
    Ok(())
}

/// Release the device's cached memory to other processes; returns its bytes.
///
/// # Errors
/// As [`synchronize`].
pub fn empty_cache(device: &Device) -> Result<u64> {
    const OP: &str = "empty_cache";
    let gpu = Gpu::of_device(OP, device)?;
    capture::refuse(OP)?;
    let context = gpu.stream().context();
    context.bind_to_thread().map_err(|error| driver_error(OP, error))?;
    memory::trim(context.cu_device()).map_err(|status| status_error(OP, status))
}

/// Wait until all work queued on the device is done.
///
/// # Errors
/// [`Error::Device`] if it is not a CUDA device, or a kernel failed; [`Error::Index`] if a kernel met an id out of range.
pub fn synchronize(device: &Device) -> Result<()> {
    const OP: &str = "synchronize";
    let gpu = Gpu::of_device(OP, device)?;
    capture::refuse(OP)?;
    gpu.stream().synchronize().map_err(|error| driver_error(OP, error))?;
    gpu.board().check()
}

/// The elements of a tensor in row-major order, on the host: those alone are moved. `T` is the type of its dtype. Waits for the device.
///
/// # Errors
/// [`Error::Device`] if it is not on a CUDA device, the driver refuses, or `T` is not its type; [`Error::Index`] if a kernel met an id
/// out of range.
pub fn download<T: WithDType>(x: &Raw) -> Result<Vec<T>> {
    const OP: &str = "to_cpu";
    let gpu = Gpu::of(OP, x)?;
    if x.dtype() != T::DTYPE {
        let (found, expected) = (x.dtype().as_str(), T::DTYPE.as_str());
        return Err(Error::dtype(OP, format!("found {found}, expected {expected}")));
    }
    let dense = contiguous(x)?;
    let count = dense.elem_count();
    let mut values: Vec<T> = Vec::with_capacity(count);
    // Without elements there is storage all the same, which nothing has written.
    if count > 0 {
        let from = address(OP, &dense)?;
        gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        // SAFETY: both have `count` elements of a plain number; all of them are written.
        unsafe {
            let to = values.as_mut_ptr().cast();
            download::download(to, from, count * size_of::<T>(), gpu.stream().cu_stream().cast())
                .map_err(|status| status_error(OP, status))?;
            values.set_len(count);
        }
    }
    gpu.board().check()?;
    Ok(values)
}
