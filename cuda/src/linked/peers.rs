//! Device memory that several processes of the machine access. One process allocates it ([`Exported`]); the other processes map it
//! ([`Opened`]) through a handle of CUDA's inter-process communication
//! (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>).

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use super::driver::{self, IpcHandle};
use super::memory::{Status, allocate_outside, check, free_outside};

/// The number of bytes of a [`Handle`].
pub const HANDLE: usize = 64;

/// The handle with which another process opens an [`Exported`].
pub type Handle = [u8; HANDLE];

/// Memory of a device that other processes can open. It comes from `cuMemAlloc` and not from the allocators of this crate, because
/// `cuIpcGetMemHandle` rejects the memory that the allocators map.
pub struct Exported {
    address: u64,
    size: u64,
    device: c_int,
}

impl Exported {
    /// Allocate at least `size` bytes on the device that is current on this thread.
    ///
    /// # Errors
    /// The driver's error; `CUDA_ERROR_OUT_OF_MEMORY` also if the limit given to `memory::set_limit` would be exceeded.
    pub fn new(size: usize) -> Result<Self, Status> {
        let size = size.max(1) as u64;
        let (address, device) = allocate_outside(size)?;
        Ok(Self { address, size, device })
    }

    /// The address of the memory in this process.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The handle with which other processes open the memory.
    ///
    /// # Errors
    /// The driver's error, for example if the system does not support such handles.
    pub fn handle(&self) -> Result<Handle, Status> {
        let mut handle = IpcHandle([0; HANDLE]);
        // SAFETY: the signature is the driver's, and `cuMemAlloc` has returned the address.
        check(unsafe { driver::cuIpcGetMemHandle(&raw mut handle, self.address) })?;
        Ok(handle.0)
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        free_outside(self.address, self.size, self.device);
    }
}

/// Device memory of another process, mapped into this one.
pub struct Opened {
    address: u64,
}

impl Opened {
    /// Map the memory that `handle` names, for the device that is current on this thread.
    ///
    /// # Errors
    /// The driver's error, for example if the devices cannot access each other's memory.
    pub fn new(handle: Handle) -> Result<Self, Status> {
        let mut address = 0;
        // SAFETY: the signature is the driver's, and the driver checks the handle.
        check(unsafe { driver::cuIpcOpenMemHandle_v2(&raw mut address, IpcHandle(handle), driver::LAZY_PEER_ACCESS) })?;
        Ok(Self { address })
    }

    /// The address of the memory in this process.
    pub const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the driver has mapped the memory, and the owner of this value guarantees that nothing uses the memory. An error is
        // ignored, because it may only mean that the other process has ended.
        unsafe { driver::cuIpcCloseMemHandle(self.address) };
    }
}

/// Queue a copy from device memory to device memory, which may belong to other processes ([`Opened`]). During a capture, the copy becomes
/// a node of the graph.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes, which must stay allocated until the copy is done and while a graph contains the copy.
pub unsafe fn copy(to: u64, from: u64, size: usize, stream: *mut c_void) -> Result<(), Status> {
    if size == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    check(unsafe { driver::cuMemcpyDtoDAsync_v2(to, from, size, stream) })
}

/// How the kernels of a device can access the memory of another device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Whether they can read and write the other device's memory.
    pub is_direct: bool,
    /// Whether they can change the other device's memory by atomic operations.
    pub has_atomics: bool,
}

/// The address of a device on the PCI bus. All processes of the machine name the device by this address.
///
/// # Errors
/// The driver's error.
pub fn bus_id(device: c_int) -> Result<String, Status> {
    let mut text = [0 as c_char; 32];
    // SAFETY: the driver writes at most as many bytes as its second argument says, and ends the text with a zero.
    check(unsafe { driver::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int - 1, device) })?;
    // SAFETY: the last byte is zero.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// How kernels of `device` can access the memory of the device whose address on the PCI bus is `bus_id`. `None` if this process does not
/// see the device at `bus_id`, or if that device is `device` itself.
///
/// # Errors
/// The driver's error.
pub fn access(device: c_int, bus_id: &str) -> Result<Option<Access>, Status> {
    let mut other = 0;
    let Ok(bus_id) = CString::new(bus_id) else { return Ok(None) };
    // SAFETY: the signature is the driver's; the text ends with a zero.
    if check(unsafe { driver::cuDeviceGetByPCIBusId(&raw mut other, bus_id.as_ptr()) }).is_err() || other == device {
        return Ok(None);
    }
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: the signature is the driver's, and it writes one integer to `value`.
        check(unsafe { driver::cuDeviceGetP2PAttribute(&raw mut value, attribute, device, other) })?;
        Ok(value != 0)
    };
    Ok(Some(Access { is_direct: has(driver::PEER_ACCESS)?, has_atomics: has(driver::PEER_ATOMICS)? }))
}
