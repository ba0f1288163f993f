//! Pinned host memory whose owner decides when it is freed.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::driver;
use super::memory::{Status, check};

/// Host memory that the GPU's copies access directly.
pub struct Pinned {
    address: *mut c_void,
    size: usize,
}

// SAFETY: it is plain memory.
unsafe impl Send for Pinned {}
// SAFETY: shared references read it.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocate `size` zero bytes. A device must be current on this thread.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(size: usize) -> Result<Self, Status> {
        let mut address = std::ptr::null_mut();
        if size > 0 {
            // SAFETY: the signature is the driver's.
            check(unsafe { driver::cuMemHostAlloc(&raw mut address, size, 0) })?;
            // SAFETY: the driver has given these bytes.
            unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, size) };
        }
        Ok(Self { address, size })
    }

    /// The bytes of the memory.
    pub fn bytes(&self) -> &[u8] {
        if self.size == 0 {
            return &[];
        }
        // SAFETY: the memory has these bytes, which were set.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.size) }
    }

    /// The bytes of the memory, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.size == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the reference is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.size) }
    }

    /// The address of the memory, for copies by the GPU.
    pub const fn address(&self) -> *mut u8 {
        self.address.cast()
    }

    /// The number of bytes.
    pub const fn len(&self) -> usize {
        self.size
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Give the memory up without freeing it. This object has no bytes afterwards.
    pub const fn leak(&mut self) {
        self.size = 0;
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.size > 0 {
            // SAFETY: the driver gave the memory, and the owner ensures that nothing uses it.
            unsafe { driver::cuMemFreeHost(self.address) };
        }
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts of the process.
const PORTABLE: u32 = 1;

/// Pin memory of the process, which may be shared with other processes, so that the GPU's copies access it directly. A device must be
/// current on this thread.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The memory has `size` bytes, starts and ends at a page, and stays mapped until [`unregister`].
pub unsafe fn register(address: NonNull<u8>, size: usize) -> Result<(), Status> {
    // SAFETY: the caller's promise.
    check(unsafe { driver::cuMemHostRegister_v2(address.as_ptr().cast(), size, PORTABLE) })
}

/// Undo [`register`]. The owner of the memory ensures that no copy accesses it any more.
pub fn unregister(address: NonNull<u8>) {
    // SAFETY: the driver checks that the memory is registered.
    unsafe { driver::cuMemHostUnregister(address.as_ptr().cast()) };
}
