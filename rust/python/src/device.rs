//! Devices by name, and the state of CUDA and its memory.

use std::path::PathBuf;

use pyo3::inspect::PyStaticExpr;
use pyo3::prelude::*;
use pyo3::type_hint_identifier;
use pyo3::types::{PyList, PyString};
use tc::device;
use trainable_candle_core as tc;

use crate::call::detached;
use crate::error::Result;

pub use tc::device::{is_name as looks_like_device, name};

/// A device argument: `"cpu"`, `"cuda"` or `"cuda:1"`.
#[derive(Clone)]
pub struct DeviceArg(pub tc::Device);

impl Default for DeviceArg {
    fn default() -> Self {
        Self(tc::Device::Cpu)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for DeviceArg {
    type Error = PyErr;
    const INPUT_TYPE: PyStaticExpr = type_hint_identifier!("builtins", "str");

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(parse(object.cast::<PyString>()?.to_str()?)?))
    }
}

/// Find the device with the name `text`, such as "cuda:1".
///
/// # Errors
/// `DeviceError` if the name is unknown or there is no such device, `CudaUnavailableError` if CUDA cannot be used.
pub fn parse(text: &str) -> Result<tc::Device> {
    Ok(device::parse(text, || Python::attach(library_folders))?)
}

/// The folders in which NVIDIA's pip packages have the CUDA libraries.
fn library_folders(py: Python<'_>) -> Vec<PathBuf> {
    pip_folders(py, "nvidia/cu13/lib")
}

/// The existing folders with the relative path `subfolder` in the folders that Python imports from (`sys.path`).
pub fn pip_folders(py: Python<'_>, subfolder: &str) -> Vec<PathBuf> {
    let entries = || py.import("sys")?.getattr("path")?.cast_into::<PyList>().map_err(PyErr::from);
    let folder = |entry: Bound<'_, PyAny>| Some(PathBuf::from(entry.extract::<String>().ok()?).join(subfolder));
    entries()
        .map_or_else(|_| Vec::new(), |entries| entries.iter().filter_map(folder).filter(|path| path.is_dir()).collect())
}

/// Return why CUDA cannot be used, or None if it can.
#[pyfunction]
pub fn cuda_unavailable_reason(py: Python<'_>) -> Option<String> {
    device::cuda_count(&library_folders(py)).err().map(|error| match error {
        tc::Error::CudaUnavailable(reason) => reason,
        other => other.to_string(),
    })
}

/// Return the number of CUDA devices.
///
/// Raises:
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_device_count(py: Python<'_>) -> Result<usize> {
    Ok(device::cuda_count(&library_folders(py))?)
}

/// Wait until all work queued on a CUDA device is done.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or a kernel failed.
///     CudaUnavailableError: if CUDA cannot be used.
///     IndexOutOfRangeError: if a kernel has found an index out of range.
#[pyfunction]
pub fn cuda_synchronize(py: Python<'_>, device: DeviceArg) -> Result<()> {
    detached(py, || device::synchronize(&device.0))
}

/// Return memory statistics of a CUDA device: ten numbers, in this order. Numbers 0 to 7 count this process alone.
///
/// 0. Allocated bytes.
/// 1. Peak of the allocated bytes.
/// 2. Reserved bytes.
/// 3. Peak of the reserved bytes.
/// 4. The part of the reserved bytes that captured graphs keep.
/// 5. How often tensors and workspaces allocated memory.
/// 6. How often memory of the device was reserved.
/// 7. How often memory ran out and cached memory was released.
/// 8. Bytes of the device that are free for any process.
/// 9. All bytes of the device.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_memory_stats(device: DeviceArg) -> Result<Vec<u64>> {
    let stats = device::memory_stats(&device.0)?;
    Ok(vec![
        stats.allocated,
        stats.peak_allocated,
        stats.reserved,
        stats.peak_reserved,
        stats.graphs,
        stats.allocations,
        stats.growths,
        stats.retries,
        stats.free,
        stats.total,
    ])
}

/// Limit the bytes of a CUDA device's memory that tensors and workspaces of this process may take; None removes the
/// limit.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_set_memory_limit(device: DeviceArg, limit: Option<u64>) -> Result<()> {
    Ok(device::set_memory_limit(&device.0, limit)?)
}

/// Return whether some of a device's streamed weights (weights in host memory, copied to the device before each use)
/// are in host memory that is not pinned, because the system provides too little pinned memory. CUDA graphs cannot copy
/// weights from memory that is not pinned. For the CPU, return False.
///
/// Raises:
///     DeviceError: if there is no such device.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_stages_weights(device: DeviceArg) -> bool {
    tc::streaming::is_staging(&device.0)
}

/// Return how many of `wanted` bytes of pinned memory this process can allocate now, by allocating and freeing them.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_pinnable_bytes(py: Python<'_>, device: DeviceArg, wanted: usize) -> Result<usize> {
    detached(py, || tc::streaming::pinnable(&device.0, wanted))
}

/// Return the product name of a CUDA device, such as "NVIDIA A100-SXM4-80GB".
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_device_name(device: DeviceArg) -> Result<String> {
    Ok(device::device_name(&device.0)?)
}

/// Return the address of a CUDA device on the PCI bus. It names the device in all processes of the machine.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_bus_id(device: DeviceArg) -> Result<String> {
    Ok(device::bus_id(&device.0)?)
}

/// Return how `device` reads the memory of the device with the address `bus_id` on the PCI bus: "nvlink", "bus" (the
/// PCI bus), or "none" if `device` cannot read that memory. Return None if this process does not see the device at
/// `bus_id`, or if that is `device` itself.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_link(device: DeviceArg, bus_id: &str) -> Result<Option<&'static str>> {
    let name = |link| match link {
        device::Link::NvLink => "nvlink",
        device::Link::Bus => "bus",
        device::Link::None => "none",
    };
    Ok(device::link(&device.0, bus_id)?.map(name))
}

/// Release the cached memory of a CUDA device to other processes; return the number of bytes released.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_empty_cache(py: Python<'_>, device: DeviceArg) -> Result<u64> {
    detached(py, || device::empty_cache(&device.0))
}

/// Measure the time of every kernel launch on a CUDA device from now on.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device.
///     CudaUnavailableError: if CUDA cannot be used.
///     ArgumentError: if launches are already being measured.
#[pyfunction]
pub fn cuda_start_profile(device: DeviceArg) -> Result<()> {
    Ok(device::start_profile(&device.0)?)
}

/// Stop measuring, and wait for the device. Return (name, number of launches, total milliseconds) for each kernel that
/// was launched since `cuda_start_profile`, the longest total first. CUDA graphs and copies are not measured.
///
/// Raises:
///     ArgumentError: if no launches are being measured.
///     DeviceError: if a kernel failed.
#[pyfunction]
pub fn cuda_finish_profile(py: Python<'_>) -> Result<Vec<(String, u64, f64)>> {
    let times = detached(py, device::finish_profile)?;
    Ok(times.into_iter().map(|time| (time.name, time.count, time.milliseconds)).collect())
}

/// Set the memory peaks of a CUDA device to the bytes that are allocated and reserved now.
///
/// Raises:
///     DeviceError: if `device` is not a CUDA device or the driver reports an error.
///     CudaUnavailableError: if CUDA cannot be used.
#[pyfunction]
pub fn cuda_reset_peak_memory_stats(device: DeviceArg) -> Result<()> {
    Ok(device::reset_peak_memory_stats(&device.0)?)
}
