//! Devices by name, and the memory, the connections and the kernel times of CUDA devices.

pub(crate) mod stats;

use std::path::Path;

use candle_core::{Device, DeviceLocation};

use crate::{Error, Result};

pub use crate::cuda::communicator;
pub use stats::{KernelTime, MemoryStats};

/// Whether `text` is meant as a device and not as a dtype: the part before a `:` is `cpu` or `cuda`. The device need
/// not exist.
pub fn is_name(text: &str) -> bool {
    matches!(text.split(':').next(), Some("cpu" | "cuda"))
}

/// The device with a name such as `"cpu"`, `"cuda"` or `"cuda:1"`. All calls with the same name return the same device.
/// The first call for CUDA looks for the CUDA libraries, first in `folders` and then where the system's loader looks.
/// `folders` is called only for CUDA.
///
/// # Errors
/// [`Error::Device`] if the name is unknown or there is no such device, [`Error::CudaUnavailable`], with the reason, if
/// CUDA cannot be used, [`Error::OutOfMemory`] if the device's memory is full.
pub fn parse(text: &str, folders: impl FnOnce() -> Vec<std::path::PathBuf>) -> Result<Device> {
    let (kind, index) = text.split_once(':').map_or((text, None), |(kind, index)| (kind, Some(index)));
    match (kind, index.map(str::parse::<usize>)) {
        ("cpu", None | Some(Ok(0))) => Ok(Device::Cpu),
        ("cuda", None) => cuda(0, &folders()),
        ("cuda", Some(Ok(ordinal))) => cuda(ordinal, &folders()),
        _ => {
            let message = format!("unknown device \"{text}\"; expected \"cpu\", \"cuda\" or \"cuda:N\"");
            Err(Error::device("device", message))
        }
    }
}

/// The name of a device, as [`parse`] and messages use it.
pub fn name(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cpu => "cpu".to_owned(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// The CUDA device with this number. All calls with the same number return the same device. The first call looks for
/// the CUDA libraries, first in `folders` and then where the system's loader looks.
///
/// # Errors
/// As [`parse`] for a CUDA device.
pub fn cuda(ordinal: usize, folders: &[impl AsRef<Path>]) -> Result<Device> {
    let folders: Vec<&Path> = folders.iter().map(AsRef::as_ref).collect();
    crate::cuda::open(ordinal, &folders)
}

/// The number of CUDA devices. The libraries are looked for as in [`cuda()`].
///
/// # Errors
/// [`Error::CudaUnavailable`], with the reason, if CUDA cannot be used; [`Error::Device`] if the driver reports an
/// error.
pub fn cuda_count(folders: &[impl AsRef<Path>]) -> Result<usize> {
    let folders: Vec<&Path> = folders.iter().map(AsRef::as_ref).collect();
    crate::cuda::devices(&folders)
}

/// The memory statistics of a CUDA device.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device or the driver reports an error.
pub fn memory_stats(device: &Device) -> Result<MemoryStats> {
    crate::cuda::memory_stats(device)
}

/// Set the peaks in a CUDA device's memory statistics to the present values.
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    crate::cuda::reset_peak_memory_stats(device)
}

/// Limit the bytes of a CUDA device's memory that tensors and workspaces may take from now on. What CUDA takes for
/// itself does not count. With None there is no limit. An allocation above the limit fails as if memory had run out.
///
/// # Errors
/// As [`memory_stats`].
pub fn set_memory_limit(device: &Device, limit: Option<u64>) -> Result<()> {
    crate::cuda::set_memory_limit(device, limit)
}

/// The name of a CUDA device's model, such as `NVIDIA H200`.
///
/// # Errors
/// As [`memory_stats`].
pub fn device_name(device: &Device) -> Result<String> {
    crate::cuda::device_name(device)
}

/// The connection through which a device reads the memory of another device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// NVLink.
    NvLink,
    /// The PCI bus.
    Bus,
    /// The device cannot read that memory.
    None,
}

/// The address of a CUDA device on the PCI bus, such as `0000:3B:00.0`. It names the device in all processes of a
/// machine.
///
/// # Errors
/// As [`memory_stats`].
pub fn bus_id(device: &Device) -> Result<String> {
    crate::cuda::peers::bus_id(device)
}

/// How a CUDA device reads the memory of the device with the address `bus_id` (see [`bus_id()`]). `None` if this
/// process does not see that device, or if both are the same device.
///
/// # Errors
/// As [`memory_stats`].
pub fn link(device: &Device, bus_id: &str) -> Result<Option<Link>> {
    crate::cuda::peers::link(device, bus_id)
}

/// Release the cached memory of a CUDA device to other processes; returns the number of bytes that were released.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, if a graph is being captured, or if the driver reports an error.
pub fn empty_cache(device: &Device) -> Result<u64> {
    crate::cuda::empty_cache(device)
}

/// Wait until all work queued on a CUDA device is done.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, if a graph is being captured, or if a kernel failed;
/// [`Error::Index`] if a kernel has found an id out of range.
pub fn synchronize(device: &Device) -> Result<()> {
    crate::cuda::synchronize(device)
}

/// Measure the times of kernels launched on a CUDA device from now on, until [`finish_profile`]. CUDA graphs and copies
/// are not measured.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, or the driver reports an error; [`Error::Argument`] if another
/// profile is in progress.
pub fn start_profile(device: &Device) -> Result<()> {
    crate::cuda::profile::start(device)
}

/// End the profile, and wait for the device. Returns the times of all kernels measured since [`start_profile`], by
/// name, the longest first.
///
/// # Errors
/// [`Error::Argument`] if no profile is in progress, [`Error::Device`] if a kernel failed.
pub fn finish_profile() -> Result<Vec<KernelTime>> {
    crate::cuda::profile::finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_two_names_and_errors_quote_wrong_names() {
        assert!(parse("cpu", Vec::new).unwrap().is_cpu() && parse("cpu:0", Vec::new).unwrap().is_cpu());
        for wrong in ["", "gpu", "cpu:1", "cuda:x", "cuda:-1", "cuda:"] {
            let error = parse(wrong, Vec::new).unwrap_err();
            assert!(matches!(error, Error::Device { .. }), "{wrong}: {error}");
            assert!(error.to_string().contains(&format!("\"{wrong}\"")), "{error}");
        }
    }
}
