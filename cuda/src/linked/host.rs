//! Pinned host memory: [`Pinned`] is allocated by the driver, and [`register`] pins memory of the process.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::driver;
use super::memory::{Status, check};

/// Pinned host memory, which the GPU's copies access directly. It is freed on drop, so the owner must drop it only when no queued copy and
/// no graph uses it any more.
pub struct Pinned {
    address: *mut c_void,
    size: usize,
}

// SAFETY: the memory belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: methods of shared references only read the memory.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocate `size` bytes, all of them 0. A device must be current on this thread.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(size: usize) -> Result<Self, Status> {
        let mut address = std::ptr::null_mut();
        if size > 0 {
            // SAFETY: the signature is the driver's. The last argument means no flags.
            check(unsafe { driver::cuMemHostAlloc(&raw mut address, size, 0) })?;
            // SAFETY: the driver has allocated `size` bytes at `address`.
            unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, size) };
        }
        Ok(Self { address, size })
    }

    /// The bytes of the memory.
    pub fn bytes(&self) -> &[u8] {
        if self.size == 0 {
            return &[];
        }
        // SAFETY: the memory has `size` bytes, and `new` has set them all.
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

    /// Leave the memory allocated until the process ends. Afterwards, this object has no bytes, and its drop frees nothing.
    pub const fn leak(&mut self) {
        self.size = 0;
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.size > 0 {
            // SAFETY: the driver allocated the memory, and the owner ensures that nothing uses it any more.
            unsafe { driver::cuMemFreeHost(self.address) };
        }
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts of the process.
const PORTABLE: u32 = 1;

/// Pin `size` bytes of the process's memory, so that the GPU's copies access them directly. The memory may be shared with other processes.
/// A device must be current on this thread.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The memory must have `size` bytes, start and end at page boundaries, and stay mapped until [`unregister`].
pub unsafe fn register(address: NonNull<u8>, size: usize) -> Result<(), Status> {
    // SAFETY: the caller's promise.
    check(unsafe { driver::cuMemHostRegister_v2(address.as_ptr().cast(), size, PORTABLE) })
}

/// Undo [`register`]. No queued copy and no graph may access the memory any more: the caller must ensure this.
pub fn unregister(address: NonNull<u8>) {
    // SAFETY: the driver checks that the memory is registered.
    unsafe { driver::cuMemHostUnregister(address.as_ptr().cast()) };
}

/// The smallest and the largest number of bytes that [`pinnable`] allocates at once. The first allocation has the
/// smallest size.
const STEPS: [usize; 2] = [64 << 20, 1 << 30];

/// How many bytes, up to `wanted`, the driver can pin in this process now. The function allocates pinned memory in
/// growing steps, then frees all of it. A result below `wanted` may be too small by up to the smallest step, 64 MiB. A
/// device must be current on this thread.
///
/// # Errors
/// The driver's error, unless it means that this memory cannot be pinned.
pub fn pinnable(wanted: usize) -> Result<usize, Status> {
    let [smallest, mut largest] = STEPS;
    let (mut held, mut found, mut step) = (Vec::new(), 0, smallest);
    while found < wanted {
        let bytes = step.min(wanted - found);
        let mut address = std::ptr::null_mut();
        // SAFETY: the signature is the driver's. The last argument means no flags.
        match check(unsafe { driver::cuMemHostAlloc(&raw mut address, bytes, 0) }) {
            Ok(()) => {
                // Freed on drop; nothing reads the bytes, so they are not set to zero.
                held.push(Pinned { address, size: bytes });
                found += bytes;
                step = (2 * step).min(largest);
            }
            Err(status) if !status.is_unpinnable() => return Err(status),
            Err(_) if bytes <= smallest => break,
            // The step was too large: continue with at most half of it.
            Err(_) => {
                largest = (bytes / 2).max(smallest);
                step = largest;
            }
        }
    }
    Ok(found)
}
