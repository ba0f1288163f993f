//! Pinned memory of the host that kernels read and write over the bus. Kernels use the same addresses as the host.
//!
//! Tensors own this memory as they own device memory: freeing a tensor calls this crate's replacement of `cuMemFreeAsync`, which passes
//! addresses of this memory to [`free`]. The memory is in no [`Allocator`](crate::allocator::Allocator) and is not counted as device
//! memory.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{self, Stream};
use super::memory::{Status, check, is_capturing};

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`: pinned for all contexts, in the address space of the devices.
const PORTABLE_AND_MAPPED: u32 = 3;

struct Block {
    size: usize,
    /// The context that the block was allocated in.
    context: usize,
    /// None while the block has an owner. After the owner has freed the block: the stream whose work may still use the block.
    last_stream: Option<usize>,
}

/// The blocks by address.
static BLOCKS: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());

fn blocks() -> MutexGuard<'static, BTreeMap<u64, Block>> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocate `size` bytes, set them to zero, and return their address, which is the same for the host and for kernels. `size` must be
/// at least 1. A device must be current on this thread.
///
/// # Errors
/// The driver's error.
pub fn allocate(size: usize) -> Result<u64, Status> {
    // Also free blocks that an earlier call could not free while a graph was captured.
    sweep();
    let (mut address, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the signatures are the driver's. With unified addressing, which every 64-bit system has, kernels use the address of the host.
    unsafe {
        check(driver::cuCtxGetCurrent(&raw mut context))?;
        check(driver::cuMemHostAlloc(&raw mut address, size, PORTABLE_AND_MAPPED))?;
        std::ptr::write_bytes(address.cast::<u8>(), 0, size);
    }
    blocks().insert(address as u64, Block { size, context: context as usize, last_stream: None });
    Ok(address as u64)
}

/// Whether an address is in one of the blocks.
pub fn owns(address: u64) -> bool {
    blocks().range(..=address).next_back().is_some_and(|(start, block)| address - start < block.size as u64)
}

/// The bytes of all blocks, including those that have no owner but are not freed yet.
pub fn held() -> usize {
    blocks().values().map(|block| block.size).sum()
}

/// Free a block once the work that is now queued on `stream` is done. Returns false if the address is not that of a
/// block.
pub(crate) fn free(address: u64, stream: Stream) -> bool {
    let is_known = blocks().get_mut(&address).map(|block| block.last_stream = Some(stream as usize)).is_some();
    if is_known {
        sweep();
    }
    is_known
}

/// Wait for the streams of the blocks that have no owner, and free these blocks. While a graph is captured, nothing can wait for a
/// stream, so these blocks stay until a later call.
pub(crate) fn sweep() {
    let mut blocks = blocks();
    let waiting: Vec<u64> =
        blocks.iter().filter(|(_, block)| block.last_stream.is_some()).map(|(&address, _)| address).collect();
    if waiting.is_empty() || is_capturing() {
        return;
    }
    let mut previous_context = std::ptr::null_mut();
    // SAFETY: the signature is the driver's.
    unsafe { driver::cuCtxGetCurrent(&raw mut previous_context) };
    for address in waiting {
        let Some(Block { context, last_stream: Some(stream), .. }) = blocks.get(&address) else { continue };
        // SAFETY: contexts and streams live as long as the process. A block without an owner is freed once, after the work that uses it.
        // An error of the driver cannot be handled here; it leaks the block.
        unsafe {
            driver::cuCtxSetCurrent(*context as *mut c_void);
            if check(driver::cuStreamSynchronize(*stream as Stream)).is_ok() {
                driver::cuMemFreeHost(address as *mut c_void);
            }
        }
        blocks.remove(&address);
    }
    // SAFETY: the context was current before.
    unsafe { driver::cuCtxSetCurrent(previous_context) };
}

/// Copy `size` bytes of this pinned memory to other memory of the host, after the work that is queued on `stream`.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `to` and `from` must be valid for `size` bytes, and `from` must be an address of this memory. The stream must belong to the current
/// device and must not be capturing.
pub unsafe fn read(to: *mut u8, from: u64, size: usize, stream: *mut c_void) -> Result<(), Status> {
    // SAFETY: the caller's promise.
    unsafe {
        check(driver::cuStreamSynchronize(stream))?;
        std::ptr::copy_nonoverlapping(from as *const u8, to, size);
    }
    Ok(())
}
