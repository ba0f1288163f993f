//! Device memory. `allocate` and `free` replace the driver's `cuMemAllocAsync` and `cuMemFreeAsync`, so that candle's allocations and
//! this project's come from the same [`Allocator`]. There is one allocator for each stream.
//!
//! An allocator takes blocks from pools; a pool is a reserved range of addresses, to which memory is mapped when it is needed. Memory that
//! a captured CUDA graph uses is in a separate space with its own pools. Eager work is all work outside of graphs.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use super::driver::{self, Access, AllocationProperties, Location, Stream};
use super::mapped;
use crate::allocator::{Allocator, Backend, Origin, PAGE, Stats};

/// A status other than `CUDA_SUCCESS` that a function of the driver returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub c_int);

impl Status {
    /// Whether memory has run out.
    pub const fn is_out_of_memory(self) -> bool {
        self.0 == driver::OUT_OF_MEMORY
    }

    /// Whether the status means that the driver cannot pin this host memory: too much memory is pinned, or pinning is not permitted or not
    /// supported.
    pub const fn is_unpinnable(self) -> bool {
        matches!(self.0, driver::OUT_OF_MEMORY | driver::NOT_PERMITTED | driver::NOT_SUPPORTED)
    }
}

pub(crate) const fn check(status: c_int) -> Result<(), Status> {
    if status == driver::SUCCESS { Ok(()) } else { Err(Status(status)) }
}

/// Maps a device's memory for the allocator of `stream`, through the driver's virtual memory management.
struct Driver {
    device: c_int,
    /// The stream's handle; a number, because a raw pointer cannot be sent to another thread.
    stream: usize,
}

/// This process's use of a device's memory, in bytes.
#[derive(Clone, Copy, Default)]
struct Share {
    /// All memory that the allocators have mapped or that [`allocate_outside`] has allocated.
    mapped: u64,
    /// The part of `mapped` that [`allocate_outside`] has allocated.
    outside: u64,
    /// The largest allowed value of `mapped`; None for no limit.
    limit: Option<u64>,
}

/// The shares, by device.
static SHARES: Mutex<BTreeMap<c_int, Share>> = Mutex::new(BTreeMap::new());

fn with_share<T>(device: c_int, work: impl FnOnce(&mut Share) -> T) -> T {
    work(SHARES.lock().unwrap_or_else(PoisonError::into_inner).entry(device).or_default())
}

/// Add `size` bytes, which the caller is about to map, to the device's mapped bytes. If they would exceed the limit, adds nothing and
/// returns `CUDA_ERROR_OUT_OF_MEMORY`.
fn charge(device: c_int, size: u64) -> Result<(), Status> {
    with_share(device, |share| {
        if share.limit.is_some_and(|limit| share.mapped + size > limit) {
            return Err(Status(driver::OUT_OF_MEMORY));
        }
        share.mapped += size;
        Ok(())
    })
}

/// Subtract `size` bytes, which are no longer mapped, from the device's mapped bytes.
fn refund(device: c_int, size: u64) {
    with_share(device, |share| share.mapped -= size);
}

/// Allocate memory of the current device outside of the allocators, for other processes to open: CUDA's inter-process handles do not exist
/// for memory that the allocators map. If the device is full, the allocators release their cached memory first. Returns the address and the
/// device.
pub(crate) fn allocate_outside(size: u64) -> Result<(u64, c_int), Status> {
    let mut device = 0;
    // SAFETY: the signature is the driver's.
    check(unsafe { driver::cuCtxGetDevice(&raw mut device) })?;
    let attempt = || -> Result<u64, Status> {
        charge(device, size)?;
        let mut address = 0;
        // SAFETY: as above.
        check(unsafe { driver::cuMemAlloc_v2(&raw mut address, size as usize) })
            .inspect_err(|_| refund(device, size))?;
        Ok(address)
    };
    let address = match attempt() {
        Err(status) if status.is_out_of_memory() => {
            trim(device)?;
            attempt()?
        }
        other => other?,
    };
    with_share(device, |share| share.outside += size);
    Ok((address, device))
}

/// Free the memory of [`allocate_outside`]. The driver waits until the device's queued work is done.
pub(crate) fn free_outside(address: u64, size: u64, device: c_int) {
    // SAFETY: the address is that of an allocation. If the driver returns an error, the memory leaks; nothing can be done about it here.
    unsafe { driver::cuMemFree_v2(address) };
    with_share(device, |share| {
        share.mapped -= size;
        share.outside -= size;
    });
}

impl Backend for Driver {
    type Chunk = u64;
    type Error = Status;

    fn reserve(&mut self, size: u64) -> Result<u64, Status> {
        let mut address = 0;
        let (any_address, flags) = (0, 0);
        // SAFETY: the signature is the driver's; this reserves only addresses.
        check(unsafe {
            driver::cuMemAddressReserve(&raw mut address, size as usize, PAGE as usize, any_address, flags)
        })?;
        Ok(address)
    }

    fn map(&mut self, address: u64, size: u64) -> Result<u64, Status> {
        charge(self.device, size)?;
        self.create(address, size as usize).inspect_err(|_| refund(self.device, size))
    }

    fn unmap(&mut self, address: u64, size: u64, handle: u64) {
        // SAFETY: `map` mapped the handle's memory to the range, and no queued work of the stream uses the range. If the driver returns an
        // error, the memory leaks; nothing can be done about it here.
        unsafe {
            driver::cuMemUnmap(address, size as usize);
            driver::cuMemRelease(handle);
        }
        refund(self.device, size);
    }

    fn wait(&mut self) -> Result<(), Status> {
        // SAFETY: the stream lives as long as the device.
        check(unsafe { driver::cuStreamSynchronize(self.stream as Stream) })
    }

    fn full() -> Status {
        Status(driver::OUT_OF_MEMORY)
    }

    fn is_full(status: &Status) -> bool {
        status.0 == driver::OUT_OF_MEMORY
    }
}

impl Driver {
    /// Create `size` bytes of device memory and map them at `address`, in a reserved range. Returns the memory's handle.
    fn create(&self, address: u64, size: usize) -> Result<u64, Status> {
        let location = Location::device(self.device);
        let properties = AllocationProperties {
            // "Pinned" means here that the memory cannot migrate from the device.
            kind: driver::PINNED,
            handle_kinds: 0,
            location,
            windows: std::ptr::null_mut(),
            flags: 0,
        };
        let access = Access { location, flags: driver::READ_WRITE };
        let (offset, flags, mut handle) = (0, 0, 0);
        // SAFETY: the signatures are the driver's; the allocator has reserved these addresses, and no memory is mapped there.
        unsafe {
            check(driver::cuMemCreate(&raw mut handle, size, &raw const properties, flags))?;
            if let Err(status) = check(driver::cuMemMap(address, size, offset, handle, flags)) {
                driver::cuMemRelease(handle);
                return Err(status);
            }
            if let Err(status) = check(driver::cuMemSetAccess(address, size, &raw const access, /* count: */ 1)) {
                driver::cuMemUnmap(address, size);
                driver::cuMemRelease(handle);
                return Err(status);
            }
        }
        Ok(handle)
    }
}

/// The allocators, one for each stream that has requested memory.
static ALLOCATORS: Mutex<Vec<Allocator<Driver>>> = Mutex::new(Vec::new());

fn allocators() -> MutexGuard<'static, Vec<Allocator<Driver>>> {
    ALLOCATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Run `work` with the allocator of a stream. The stream's device must be current on this thread.
fn with_allocator<T>(
    stream: Stream,
    work: impl FnOnce(&mut Allocator<Driver>) -> Result<T, Status>,
) -> Result<T, Status> {
    let mut device = 0;
    // SAFETY: the signature is the driver's.
    check(unsafe { driver::cuCtxGetDevice(&raw mut device) })?;
    let mut allocators = allocators();
    let is_requested = |backend: &Driver| backend.device == device && backend.stream == stream as usize;
    if let Some(allocator) = allocators.iter_mut().find(|allocator| is_requested(allocator.backend())) {
        return work(allocator);
    }
    let (mut free, mut total) = (0, 0);
    // SAFETY: the signature is the driver's.
    check(unsafe { driver::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    // Each pool reserves addresses for twice the device's memory, so that gaps between blocks in use do not exhaust the addresses.
    let mut new = Allocator::new(Driver { device, stream: stream as usize }, 2 * total as u64);
    let result = work(&mut new);
    allocators.push(new);
    result
}

/// Whether every block is an allocation of the driver, and no free block is cached (environment variable `TRAINABLE_CANDLE_CUDA_POOLS=0`).
/// Tools that look for accesses beyond the end of a block need this mode: with pools, such a tool sees only the pool, not its blocks. This
/// mode is slow, has no statistics, and rejects graphs.
static WITHOUT_POOLS: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("TRAINABLE_CANDLE_CUDA_POOLS").is_some_and(|value| value == "0"));

/// The replacement of `cuMemAllocAsync`.
pub(crate) extern "C" fn allocate(address: *mut u64, size: usize, stream: Stream) -> c_int {
    match allocate_from(None, size, stream) {
        Ok(found) => {
            // SAFETY: as for the driver's function, the caller passes a valid pointer to store the address at.
            unsafe { *address = found };
            driver::SUCCESS
        }
        Err(status) => status.0,
    }
}

/// Allocate from the space `origin`. If `origin` is None, allocate from the space of graphs during a capture, and else
/// from that of eager work. Returns the address.
pub(crate) fn allocate_from(origin: Option<Origin>, size: usize, stream: Stream) -> Result<u64, Status> {
    if *WITHOUT_POOLS {
        let mut address = 0;
        // SAFETY: the signature is the driver's.
        check(unsafe { driver::cuMemAlloc_v2(&raw mut address, size.max(1)) })?;
        return Ok(address);
    }
    with_allocator(stream, |allocator| match origin {
        Some(origin) => allocator.allocate_from(origin, size as u64),
        None => allocator.allocate(size as u64),
    })
}

/// The replacement of `cuMemFreeAsync`. `stream` must be the stream that the memory was allocated for.
pub(crate) extern "C" fn free(address: u64, stream: Stream) -> c_int {
    if *WITHOUT_POOLS {
        // Tensors also own pinned memory of the host, from `mapped`.
        if mapped::free(address, stream) {
            return driver::SUCCESS;
        }
        // SAFETY: the caller got the address from `allocate`. The driver waits for the work that uses it.
        return unsafe { driver::cuMemFree_v2(address) };
    }
    let is_freed = address == 0 || allocators().iter_mut().any(|allocator| allocator.free(address));
    if is_freed || mapped::free(address, stream) { driver::SUCCESS } else { driver::INVALID_VALUE }
}

/// The statistics of a device: each is the sum over the device's allocators. The bytes, except `graphs`, include the memory outside of
/// the allocators.
pub fn stats(device: i32) -> Stats {
    let outside = with_share(device, |share| share.outside);
    let allocators = allocators();
    let start = Stats {
        allocated: outside,
        peak_allocated: outside,
        reserved: outside,
        peak_reserved: outside,
        ..Stats::default()
    };
    let of_device = allocators.iter().filter(|allocator| allocator.backend().device == device);
    of_device.fold(start, |sum, allocator| {
        let stats = allocator.stats();
        Stats {
            allocated: sum.allocated + stats.allocated,
            peak_allocated: sum.peak_allocated + stats.peak_allocated,
            reserved: sum.reserved + stats.reserved,
            peak_reserved: sum.peak_reserved + stats.peak_reserved,
            graphs: sum.graphs + stats.graphs,
            allocations: sum.allocations + stats.allocations,
            growths: sum.growths + stats.growths,
            retries: sum.retries + stats.retries,
        }
    })
}

/// Limit the bytes of a device's memory that this process has mapped, in the allocators and outside of them; None means no limit. If more
/// is mapped already, it stays mapped, but no more can be mapped.
pub fn set_limit(device: i32, limit: Option<u64>) {
    with_share(device, |share| share.limit = limit);
}

/// The limit of a device.
pub fn limit(device: i32) -> Option<u64> {
    with_share(device, |share| share.limit)
}

/// Reset the memory peaks of a device to the current values.
pub fn reset_peaks(device: i32) {
    let mut allocators = allocators();
    let of_device = allocators.iter_mut().filter(|allocator| allocator.backend().device == device);
    of_device.for_each(Allocator::reset_peaks);
}

/// Release a device's cached memory, after waiting for the work that is queued on the streams with cached memory. Returns the number of
/// released bytes. The device must be current.
///
/// # Errors
/// The driver's error.
pub fn trim(device: i32) -> Result<u64, Status> {
    // Free pinned memory of the host that no tensor owns any more.
    mapped::sweep();
    let mut allocators = allocators();
    let of_device = allocators.iter_mut().filter(|allocator| allocator.backend().device == device);
    of_device.map(Allocator::trim).sum()
}

/// Whether a graph is being captured.
static IS_CAPTURING: AtomicBool = AtomicBool::new(false);

/// Whether a graph is being captured.
pub(crate) fn is_capturing() -> bool {
    IS_CAPTURING.load(Ordering::Acquire)
}

/// Whether an address is in the space of graphs.
pub fn is_of_graphs(address: u64) -> bool {
    allocators().iter().any(|allocator| allocator.is_of_graphs(address))
}

/// Release the stream's cached memory, and from now on allocate its memory from the space of graphs. Must be called
/// before the stream starts to capture. The stream's device must be current.
///
/// # Errors
/// The driver's error; `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` if `TRAINABLE_CANDLE_CUDA_POOLS` is 0.
///
/// # Safety
/// `stream` must be a stream of the current device.
pub unsafe fn begin_capture(stream: *mut c_void) -> Result<(), Status> {
    if *WITHOUT_POOLS {
        return Err(Status(driver::CAPTURE_UNSUPPORTED));
    }
    with_allocator(stream, Allocator::begin_capture)?;
    // The process captures at most one graph at a time, so one flag is enough.
    IS_CAPTURING.store(true, Ordering::Release);
    Ok(())
}

/// The address ranges of the blocks that a stream's current or last capture has allocated and that are still in use. The stream's device
/// must be current.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The conditions of [`begin_capture`].
pub unsafe fn kept_by_capture(stream: *mut c_void) -> Result<Vec<Range<u64>>, Status> {
    with_allocator(stream, |allocator| Ok(allocator.captured().collect()))
}

/// Allocate memory of a stream for eager work again; the graph exists until [`release_graph`]. The stream's device must be current.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The conditions of [`begin_capture`].
pub unsafe fn end_capture(stream: *mut c_void) -> Result<(), Status> {
    IS_CAPTURING.store(false, Ordering::Release);
    with_allocator(stream, |allocator| {
        allocator.end_capture();
        Ok(())
    })
}

/// Map memory again at the addresses of a stream's graphs whose memory was unmapped for eager work. Must be called before each replay. The
/// stream's device must be current.
///
/// # Errors
/// The driver's error, such as out of memory.
///
/// # Safety
/// The conditions of [`begin_capture`].
pub unsafe fn restore_graphs(stream: *mut c_void) -> Result<(), Status> {
    with_allocator(stream, Allocator::restore)
}

/// Record that a graph of a stream was dropped. After the last graph, also releases the stream's cached memory, that of graphs too. The
/// stream's device must be current.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// The conditions of [`begin_capture`].
pub unsafe fn release_graph(stream: *mut c_void) -> Result<(), Status> {
    with_allocator(stream, Allocator::release_graph)
}
