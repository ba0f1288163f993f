//! The CUDA kernels, and access to CUDA's libraries without linking to them.
//!
//! Candle's CUDA backend calls the functions of the driver and of the CUDA libraries as linked functions. This crate defines each of
//! these functions itself, as a jump to an address in a table of slots. [`load`] opens the machine's libraries and fills each slot with
//! the address of the library's function. So an executable or extension built with CUDA also starts on a machine without CUDA, where
//! [`load`] returns what is missing.

pub mod allocator;
pub mod architectures;
// Modules of the build script: as modules of the crate, they are tested like the rest of it.
#[cfg(test)]
#[path = "../build/bindings.rs"]
mod bindings;
#[cfg(feature = "cuda")]
mod linked;
#[cfg(test)]
#[path = "../build/signature.rs"]
mod signature;
pub mod structs;

use std::path::Path;

use thiserror::Error;

#[cfg(feature = "cuda")]
pub use linked::{check_device, download, host, kernels, mapped, memory, nccl, peers, upload};

/// The lowest CUDA version that the driver must offer, as (major, minor).
pub const MINIMUM_DRIVER: (i32, i32) = (13, 0);
/// The lowest compute capability of a GPU, as (major, minor): the lowest with bf16 arithmetic.
pub const MINIMUM_CAPABILITY: (i32, i32) = (8, 0);

/// Why CUDA cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Unavailable {
    /// The program was built for the CPU alone.
    #[error("this build has no CUDA support")]
    NotBuilt,
    /// The driver's library (libcuda) cannot be opened. The field is the message of the system's loader.
    #[error("there is no NVIDIA driver on this machine ({0})")]
    NoDriver(String),
    /// The driver's library is open, but the driver cannot be initialized. The field says why.
    #[error("the NVIDIA driver does not start: {0}")]
    DriverFailed(String),
    /// The driver's version is below [`MINIMUM_DRIVER`].
    #[error(
        "the NVIDIA driver offers CUDA {}.{}, expected at least {}.{}; update the driver",
        .found.0, .found.1, MINIMUM_DRIVER.0, MINIMUM_DRIVER.1
    )]
    DriverTooOld {
        /// The CUDA version that the driver offers, as (major, minor).
        found: (i32, i32),
    },
    /// A library cannot be opened.
    #[error("{file} cannot be opened ({reason}); pip install \"trainable-candle[cuda13]\", or install CUDA 13")]
    NoLibrary {
        /// The file's name.
        file: &'static str,
        /// The message of the system's loader.
        reason: String,
    },
    /// A library lacks a function.
    #[error("{file} has no function {symbol}; its version is too old, expected that of CUDA 13 or NCCL 2.27")]
    NoFunction {
        /// The file's name.
        file: &'static str,
        /// The function's name.
        symbol: &'static str,
    },
    /// NCCL's library cannot be opened. The field is the message of the system's loader.
    #[error("libnccl.so.2 cannot be opened ({0}); pip install \"trainable-candle[nccl]\"")]
    NoNccl(String),
    /// NCCL's version is not supported.
    #[error(
        "found NCCL {}.{}.{}, expected at least 2.27 and below 3; pip install \"trainable-candle[nccl]\"",
        found / 10_000, found / 100 % 100, found % 100
    )]
    NcclVersion {
        /// The version, as `major * 10000 + minor * 100 + patch`.
        found: i32,
    },
    /// The driver finds no GPU.
    #[error("the NVIDIA driver finds no GPU; is it hidden by CUDA_VISIBLE_DEVICES?")]
    NoDevice,
    /// The GPU is below [`MINIMUM_CAPABILITY`].
    #[error(
        "the GPU {name} has compute capability {}.{}, expected at least {}.{} (Ampere or newer)",
        .found.0, .found.1, MINIMUM_CAPABILITY.0, MINIMUM_CAPABILITY.1
    )]
    CardTooOld {
        /// The GPU's name.
        name: String,
        /// Its compute capability, as (major, minor).
        found: (i32, i32),
    },
    /// The kernels were compiled for other architectures than the GPU's.
    #[error(
        "the GPU {name} has compute capability {}.{}, and this build has code for {built} alone; build the package \
         with TRAINABLE_CANDLE_CUDA_ARCHS={}{}",
        .found.0, .found.1, .found.0, .found.1
    )]
    NoCode {
        /// The GPU's name.
        name: String,
        /// Its compute capability, as (major, minor).
        found: (i32, i32),
        /// The architectures that the kernels were compiled for.
        built: &'static str,
    },
}

/// Open the driver's library and the CUDA libraries, so that candle's CUDA backend can call them. The CUDA libraries
/// are searched first in `folders` (where pip installs NVIDIA's libraries), then by the system's loader; the driver's
/// library is searched by the loader alone. This function must succeed before any CUDA call; CUDA calls before that
/// return `CUDA_ERROR_UNKNOWN`. After a success, further calls return at once. One usable GPU is enough for a success;
/// `check_device` says whether a given GPU is usable.
///
/// # Errors
/// The first reason why CUDA cannot be used. The slots stay empty then.
pub fn load(folders: &[&Path]) -> Result<(), Unavailable> {
    #[cfg(feature = "cuda")]
    return linked::load(folders);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = folders;
        Err(Unavailable::NotBuilt)
    }
}
