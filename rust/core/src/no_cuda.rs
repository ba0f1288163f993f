//! The module `cuda` of a build without CUDA. It has the interface of the CUDA runtime, so that callers need no `cfg`.
//! Functions that need CUDA always return the error that their documentation names. Types that need CUDA have no values
//! (`Infallible`), so their methods are never called. The modules in `cuda/` describe the functions and their
//! arguments in full; there, the names of the arguments have no `_`. `folders` are searched for the CUDA libraries.

use std::path::Path;

use candle_core::{CudaStorage, Device, WithDType};

use crate::device::{MemoryStats, name};
use crate::{Error, Raw, Result};

/// Returns the error of a function that needs a CUDA device.
fn no_device<T>(op: &'static str, device: &Device) -> Result<T> {
    Err(Error::device(op, format!("found the device \"{}\", expected a CUDA device", name(device))))
}

/// The CUDA device with the number `_ordinal`.
///
/// # Errors
/// [`Error::CudaUnavailable`].
pub fn open(_ordinal: usize, folders: &[&Path]) -> Result<Device> {
    // `devices` always fails, so the device below is never returned.
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

/// The memory statistics of a device.
///
/// # Errors
/// [`Error::Device`].
pub fn memory_stats(device: &Device) -> Result<MemoryStats> {
    no_device("memory_stats", device)
}

/// Set the peaks in a device's memory statistics to the memory in use now.
///
/// # Errors
/// [`Error::Device`].
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    no_device("reset_peak_memory_stats", device)
}

/// Limit the memory that tensors and workspaces may take on a device.
///
/// # Errors
/// [`Error::Device`].
pub fn set_memory_limit(device: &Device, _limit: Option<u64>) -> Result<()> {
    no_device("set_memory_limit", device)
}

/// The name of a device's model.
///
/// # Errors
/// [`Error::Device`].
pub fn device_name(device: &Device) -> Result<String> {
    no_device("device_name", device)
}

/// Release a device's cached memory to other processes; returns the number of bytes that were released.
///
/// # Errors
/// [`Error::Device`].
pub fn empty_cache(device: &Device) -> Result<u64> {
    no_device("empty_cache", device)
}

/// Wait until all work that is queued on a device is done.
///
/// # Errors
/// [`Error::Device`].
pub fn synchronize(device: &Device) -> Result<()> {
    no_device("synchronize", device)
}

/// The elements, in row-major order, of a tensor that is not on the CPU.
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
    //! Measures the time that a GPU spends in each kernel: unavailable in this build.

    use candle_core::Device;

    use crate::device::KernelTime;
    use crate::{Error, Result};

    /// Start a profile.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn start(device: &Device) -> Result<()> {
        super::no_device("profile", device)
    }

    /// The times of all kernels since [`start`].
    ///
    /// # Errors
    /// [`Error::Argument`]: no profile can have started.
    pub fn finish() -> Result<Vec<KernelTime>> {
        Err(Error::argument("profile", "no profile is in progress"))
    }
}

/// A function that runs as a CUDA graph.
pub struct Captured(std::convert::Infallible);

impl Captured {
    /// Prepare a function for capture.
    ///
    /// # Errors
    /// [`Error::Device`]: this build has no CUDA device.
    pub fn new(device: &Device, _function: crate::capture::Function, _inputs: &[&crate::Tensor]) -> Result<Self> {
        no_device("capture", device)
    }

    /// The function's results for `_inputs`.
    ///
    /// # Errors
    /// None.
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

    /// How a device reads the memory of the device whose address on the PCI bus is `_bus_id`.
    ///
    /// # Errors
    /// As [`bus_id`].
    pub fn link(device: &Device, _bus_id: &str) -> Result<Option<Link>> {
        super::no_device("link", device)
    }

    /// The shards of all processes of a machine.
    pub struct Shards(Infallible);

    impl Shards {
        /// Allocate the shard of this process; returns it with the text by which the other processes open it.
        ///
        /// # Errors
        /// As [`bus_id`].
        pub fn new(device: &Device, _bytes: usize, _number: usize, _processes: usize) -> Result<(Self, String)> {
            super::no_device("stream_blocks", device)
        }

        /// Open the shards of the other processes, given the texts that [`new`](Self::new) returned in all processes.
        ///
        /// # Errors
        /// None.
        pub const fn open(&mut self, _texts: &[&str]) -> Result<()> {
            match self.0 {}
        }

        /// The number of this process among those of the machine.
        pub const fn number(&self) -> usize {
            match self.0 {}
        }

        /// Write bytes to shards. Each piece has the process, the first byte in the process's shard, and the number of
        /// bytes.
        ///
        /// # Errors
        /// None.
        pub fn write(&self, _bytes: &[u8], _pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
            match self.0 {}
        }

        /// Read bytes of shards to a tensor. The pieces are as for [`write`](Self::write).
        ///
        /// # Errors
        /// None.
        pub fn read(&self, _to: &Raw, _pieces: impl Iterator<Item = (usize, usize, usize)>) -> Result<()> {
            match self.0 {}
        }

        /// Wait for the writes, and let no further process open the shards.
        ///
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
        /// Copy a tensor's values to the host.
        ///
        /// # Errors
        /// [`Error::Device`](crate::Error::Device): this build has no CUDA device.
        pub fn new(x: &Raw) -> Result<Self> {
            super::no_device("checkpoint", x.device())
        }

        /// Let the device's stream wait for the copy, so that other tensors may use the tensor's memory.
        ///
        /// # Errors
        /// None.
        pub const fn await_copy(&self) -> Result<()> {
            match self.0 {}
        }

        /// Copy the values to new memory of the device.
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
        /// The tensor, for work that waits for its values.
        ///
        /// # Errors
        /// None.
        pub const fn wait(self) -> Result<Raw> {
            match self.0 {}
        }
    }
}

pub mod exchange {
    //! Memory that this library shares with other libraries, which queue their work in streams of their own:
    //! unavailable in this build.

    use candle_core::{DType, Device};

    use crate::{Error, Raw, Result};

    fn unavailable<T>() -> Result<T> {
        Err(Error::CudaUnavailable(trainable_candle_cuda::Unavailable::NotBuilt.to_string()))
    }

    /// The address of a tensor's first element.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`].
    pub fn address(_tensor: &Raw) -> Result<u64> {
        unavailable()
    }

    /// The stream in which this library queues its work on a device, as the driver's handle.
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

    /// Release a tensor that another library no longer uses. Without CUDA there is no stream to wait for.
    pub fn released(_tensor: Raw, _consumer: Option<usize>) {}

    /// Copy the values of another library's tensor.
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

    /// The identifier by which the processes of a group find each other.
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

    /// This process's part in a group of processes with one GPU each.
    pub struct Communicator(std::convert::Infallible);

    impl Communicator {
        /// Join a group.
        ///
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

        /// The number of processes in the group.
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

        /// Wait until all work that is queued on the GPU is done.
        ///
        /// # Errors
        /// None.
        pub fn wait(&self, _limit: Duration) -> Result<()> {
            match self.0 {}
        }

        /// End the current or the next wait. May be called from any thread.
        pub const fn stop(&self) {
            match self.0 {}
        }
    }
}
