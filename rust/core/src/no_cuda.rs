//! The interface of the CUDA runtime in a build without CUDA: functions that return errors.

use std::path::Path;

use candle_core::{CudaStorage, Device, WithDType};

use crate::device::{MemoryStats, name};
use crate::{Error, Raw, Result};

/// The error of functions that take a CUDA device.
fn no_device<T>(op: &'static str, device: &Device) -> Result<T> {
    Err(Error::device(op, format!("found the device \"{}\", expected a CUDA device", name(device))))
}

/// The CUDA device with a number.
///
/// # Errors
/// [`Error::CudaUnavailable`].
pub fn open(_ordinal: usize, folders: &[&Path]) -> Result<Device> {
    devices(folders).map(|_| Device::Cpu)
}

/// The number of CUDA devices.
///
/// # Errors
/// [`Error::CudaUnavailable`].
pub fn devices(folders: &[&Path]) -> Result<usize> {
    let loaded = trainable_candle_cuda::load(folders).map(|()| 0);
    loaded.map_err(|reason| Error::CudaUnavailable(reason.to_string()))
}

/// The memory in use on a device.
///
/// # Errors
/// [`Error::Device`].
pub fn memory_stats(device: &Device) -> Result<MemoryStats> {
    no_device("memory_stats", device)
}

/// Reset the peaks of the memory statistics.
///
/// # Errors
/// [`Error::Device`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    no_device("reset_peak_memory_stats", device)
}

/// Limit the memory in use on a device.
///
/// # Errors
/// [`Error::Device`].
pub fn set_memory_limit(device: &Device, _limit: Option<u64>) -> Result<()> {
    no_device("set_memory_limit", device)
}

/// The name of a device.
///
/// # Errors
/// [`Error::Device`].
pub fn device_name(device: &Device) -> Result<String> {
    no_device("device_name", device)
}

/// Release cached memory to other processes.
///
/// # Errors
/// [`Error::Device`].
pub fn empty_cache(device: &Device) -> Result<u64> {
    no_device("empty_cache", device)
}

/// Wait for a device.
///
/// # Errors
/// [`Error::Device`].
pub fn synchronize(device: &Device) -> Result<()> {
    no_device("synchronize", device)
}

/// The elements of a tensor that is not on the CPU.
pub(crate) fn download<T: WithDType>(x: &Raw) -> Result<Vec<T>> {
    Ok(x.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?)
}

/// The number of elements in a CUDA storage. This build has no CUDA storages.
pub(crate) const fn storage_len(_storage: &CudaStorage) -> usize {
    0
}

/// Converts candle's CUDA error to an error of the library.
#[cold]
pub(crate) fn from_candle(error: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::device("cuda", error.to_string())
}

pub(crate) mod profile {
    //! The time that the GPU spends in each kernel.

    use candle_core::Device;

    use crate::device::KernelTime;
    use crate::{Error, Result};

    pub fn start(device: &Device) -> Result<()> {
        super::no_device("profile", device)
    }

    pub fn finish() -> Result<Vec<KernelTime>> {
        Err(Error::argument("profile", "no profile is in progress"))
    }
}

/// A function that runs as a CUDA graph: never exists in this build.
pub struct Captured(std::convert::Infallible);

impl Captured {
    /// # Errors
    /// [`Error::Device`]: this build has no CUDA device.
    pub fn new(device: &Device, _function: crate::capture::Function, _inputs: &[&crate::Tensor]) -> Result<Self> {
        no_device("capture", device)
    }

    /// The function's results for `inputs`.
    ///
    /// # Errors
    /// The errors of the function.
    pub fn call(&mut self, _inputs: &[&crate::Tensor]) -> Result<Vec<crate::Tensor>> {
        match self.0 {}
    }

    /// Whether calls replay a graph.
    pub const fn is_recorded(&self) -> bool {
        match self.0 {}
    }
}

#[path = "no_cuda_streaming.rs"]
pub mod streaming;

pub mod peers {
    //! Shards of streamed weights on several devices: unavailable in this build.

    use std::convert::Infallible;

    use candle_core::Device;

    use crate::device::Link;
    use crate::{Raw, Result};

    /// The address of a device on the PCI bus.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
    pub fn bus_id(device: &Device) -> Result<String> {
        super::no_device("bus_id", device)
    }

    /// How a device reads the memory of the device with an address on the PCI bus.
    ///
    /// # Errors
    /// As [`bus_id`].
    pub fn link(device: &Device, _bus_id: &str) -> Result<Option<Link>> {
        super::no_device("link", device)
    }

    /// The shards of all processes of a machine.
    pub struct Shards(Infallible);

    impl Shards {
        /// # Errors
        /// As [`bus_id`].
        pub fn new(device: &Device, _bytes: usize, _number: usize, _processes: usize) -> Result<(Self, String)> {
            super::no_device("stream_blocks", device)
        }

        /// # Errors
        /// None.
        pub const fn open(&mut self, _texts: &[&str]) -> Result<()> {
            match self.0 {}
        }

        /// The number of this process.
        pub const fn number(&self) -> usize {
            match self.0 {}
        }

        /// # Errors
        /// None.
        pub fn write(&self, _bytes: &[u8], _pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
            match self.0 {}
        }

        /// # Errors
        /// None.
        pub fn read(&self, _to: &Raw, _pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
            match self.0 {}
        }

        /// # Errors
        /// None.
        pub const fn close(&mut self) -> Result<()> {
            match self.0 {}
        }
    }
}

pub mod offload {
    //! Tensors that wait in the memory of the host: unavailable in this build.

    use std::convert::Infallible;

    use crate::{Raw, Result};

    /// The values of a tensor in pinned memory.
    pub struct Away(Infallible);

    impl Away {
        /// # Errors
        /// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
        pub fn new(x: &Raw) -> Result<Self> {
            super::no_device("checkpoint", x.device())
        }

        /// Allow the tensor's memory to be used for something else.
        ///
        /// # Errors
        /// None.
        pub const fn left(&self) -> Result<()> {
            match self.0 {}
        }

        /// Copy the values back.
        ///
        /// # Errors
        /// None.
        pub const fn fetch(&self) -> Result<Arriving> {
            match self.0 {}
        }
    }

    /// A tensor whose values are being copied to it.
    pub struct Arriving(Infallible);

    impl Arriving {
        /// The tensor.
        ///
        /// # Errors
        /// None.
        pub const fn wait(self) -> Result<Raw> {
            match self.0 {}
        }
    }
}

pub mod exchange {
    //! Memory shared with other libraries that use their own streams of the device.

    use candle_core::{DType, Device};

    use crate::{Error, Raw, Result};

    fn unavailable<T>() -> Result<T> {
        Err(Error::CudaUnavailable("this build has no CUDA support".to_owned()))
    }

    /// The address of a tensor's first element.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub fn address(_tensor: &Raw) -> Result<u64> {
        unavailable()
    }

    /// The stream of a device, as the driver's handle.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub fn stream(_device: &Device) -> Result<usize> {
        unavailable()
    }

    /// Make another library's stream wait until all work that this library has queued is done.
    ///
    /// # Safety
    /// None is needed: nothing is done.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub unsafe fn ready_for(_device: &Device, _consumer: usize) -> Result<()> {
        unavailable()
    }

    /// Release a tensor that another library no longer uses.
    pub fn released(_tensor: Raw, _consumer: Option<usize>) {}

    /// A copy of values in another library's memory.
    ///
    /// # Safety
    /// None is needed: nothing is read.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub unsafe fn copy(
        _device: &Device,
        _address: u64,
        _dims: &[usize],
        _strides: &[usize],
        _dtype: DType,
    ) -> Result<Raw> {
        unavailable()
    }
}

pub mod communicator {
    //! Sums and copies over the GPUs of several processes: unavailable in this build.

    use std::path::Path;
    use std::time::Duration;

    use candle_core::Device;

    use crate::{Error, Raw, Result};

    fn unavailable<T>() -> Result<T> {
        Err(Error::CudaUnavailable(trainable_candle_cuda::Unavailable::NotBuilt.to_string()))
    }

    /// The identifier that the processes share.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub fn unique_id(_folders: &[&Path]) -> Result<[u8; 128]> {
        unavailable()
    }

    /// The version of NCCL.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub fn version(_folders: &[&Path]) -> Result<i32> {
        unavailable()
    }

    /// This process's part in a group: never exists in this build.
    pub struct Communicator(std::convert::Infallible);

    impl Communicator {
        /// # Errors
        /// [`Error::CudaUnavailable`].
        pub fn new(
            _device: &Device,
            _rank: usize,
            _size: usize,
            _id: [u8; 128],
            _limit: Duration,
            _folders: &[&Path],
        ) -> Result<Self> {
            unavailable()
        }

        /// The number of this process in the group.
        pub const fn rank(&self) -> usize {
            match self.0 {}
        }

        /// The number of processes.
        pub const fn size(&self) -> usize {
            match self.0 {}
        }

        /// Replace each tensor by its sum over all processes.
        ///
        /// # Errors
        /// None.
        pub fn all_reduce(&self, _tensors: &[&Raw]) -> Result<()> {
            match self.0 {}
        }

        /// Copy the tensors of one process to all processes.
        ///
        /// # Errors
        /// None.
        pub fn broadcast(&self, _tensors: &[&Raw], _root: usize) -> Result<()> {
            match self.0 {}
        }

        /// Wait for the queued work.
        ///
        /// # Errors
        /// None.
        pub fn wait(&self, _limit: Duration) -> Result<()> {
            match self.0 {}
        }

        /// End a wait of another thread.
        pub const fn stop(&self) {
            match self.0 {}
        }
    }
}
