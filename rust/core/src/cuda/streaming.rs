//! Copies of streamed weights to a GPU, from pinned host memory or from other devices, on a separate CUDA stream, in
//! parallel with the work of the device's stream. A unit is the weights of one block of a model, and a slot is memory
//! of the device that holds one unit at a time (see `crate::streaming`).
//!
//! If the system gives too little pinned memory, pageable memory takes its place. A thread then copies the weights
//! through a small ring of pinned memory; this is called staging ([`Copier::start_staging`]).
//!
//! Events order the two streams (see `copies.rs`): a copy begins when all work queued before it is done, and work that
//! reads the copied values waits for the end of the copy.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::result;
use trainable_candle_cuda::host::{self, Pinned};
use trainable_candle_cuda::{mapped, peers, upload};

use super::copies::{Copies, Event};
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::peers::Shards;
use super::recorder;
use super::staging::{Bytes, Job};
use crate::streaming::Pages;
use crate::{Error, Raw, Result, capture};

const OP: &str = "stream_blocks";

/// The most bytes of pinned memory that the streamed weights and the tensors of `mapped.rs` may take in this process.
/// There is no limit if the environment variable `TRAINABLE_CANDLE_PINNED_BYTES` is not set or is not a number.
static LIMIT: LazyLock<usize> = LazyLock::new(|| {
    let given = std::env::var("TRAINABLE_CANDLE_PINNED_BYTES").ok();
    given.and_then(|text| text.parse().ok()).unwrap_or(usize::MAX)
});

/// The bytes of pinned memory that streamed weights take. [`LIMIT`] also counts `mapped::held()`, the bytes of the
/// tensors of `mapped.rs`.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Whether the limit allows `bytes` more of pinned memory.
pub(super) fn may_pin(bytes: usize) -> bool {
    TAKEN.load(Ordering::Acquire).saturating_add(mapped::held()).saturating_add(bytes) <= *LIMIT
}

/// Find out how many of `wanted` bytes of pinned memory this process can get now, by allocating and freeing them. On
/// the host of an H100, each GiB took 0.7 s.
///
/// # Errors
/// [`Error::Device`] if `device` is not a CUDA device, or the driver reports an error.
pub fn pinnable(device: &Device, wanted: usize) -> Result<usize> {
    const OP: &str = "pinnable";
    let gpu = Gpu::of_device(OP, device)?;
    gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
    let taken = TAKEN.load(Ordering::Acquire).saturating_add(mapped::held());
    host::pinnable(wanted.min(LIMIT.saturating_sub(taken))).map_err(|status| status_error(OP, status))
}

/// What a copy reads.
pub enum Source<'a> {
    /// Memory of the host.
    Host(&'a HostMemory),
    /// A part of a shard. Each of several processes has one shard, which is memory on its device. The first field has
    /// the shards of all processes; then come the number of the process that owns this shard, and the part's range of
    /// bytes in it.
    Peer(&'a Shards, usize, Range<usize>),
}

/// Whether any of the weights that copiers stream to a device are in pageable memory, from which graphs cannot copy.
pub fn is_staging(device: &Device) -> bool {
    Gpu::of_device(OP, device).is_ok_and(|gpu| gpu.known_copies().is_some_and(has_pageable))
}

/// Whether copies of the device read pageable memory: `pageable` counts the pieces of such memory.
fn has_pageable(copies: &Copies) -> bool {
    copies.pageable().load(Ordering::Acquire) > 0
}

/// Copies units of streamed weights to slots in the memory of a device.
pub struct Copier {
    gpu: &'static Gpu,
    /// The stream of all copies to the device, and the state that copiers share.
    copies: &'static Copies,
    /// One event per slot, recorded after the last copy to the slot.
    filled: Vec<Event>,
    /// One number per slot: that of the last job of the staging thread with copies to the slot, 0 if there is none.
    jobs: Vec<AtomicU64>,
    /// Whether [`start_staging`](Self::start_staging) was called.
    is_staging: AtomicBool,
}

impl Copier {
    /// A copier for `slots` slots.
    ///
    /// # Errors
    /// [`Error::Device`] if `device` is not a CUDA device, or the driver reports an error.
    pub fn new(device: &Device, slots: usize) -> Result<Self> {
        let gpu = Gpu::of_device(OP, device)?;
        capture::refuse(OP)?;
        let copies = gpu.copies()?;
        let filled = (0..slots).map(|_| Event::new()).collect::<std::result::Result<_, _>>();
        let jobs = (0..slots).map(|_| AtomicU64::new(0)).collect();
        Ok(Self {
            gpu,
            copies,
            filled: filled.map_err(|error| driver_error(OP, error))?,
            jobs,
            is_staging: AtomicBool::new(false),
        })
    }

    /// A number that changes whenever the capture of a graph begins or ends, and whenever a replay begins. After such a
    /// change, slots may have other contents than the last copies wrote.
    pub fn epoch(&self) -> u64 {
        self.copies.epoch()
    }

    /// Allocate host memory. The memory is pageable if [`start_staging`](Self::start_staging) was called, or if other
    /// weights that are streamed to the device are in pageable memory; otherwise it is pinned.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the limit or the system allows no more pinned memory, [`Error::Device`] if the driver
    /// reports an error or the thread that copies from pageable memory cannot start.
    pub fn allocate(&self, bytes: usize) -> Result<HostMemory> {
        if self.is_staging() || has_pageable(self.copies) {
            self.copies.start_staging(self.gpu)?;
            return Ok(self.pageable(vec![0; bytes]));
        }
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        let out_of_memory = || {
            let gib = bytes as f64 / (1u64 << 30) as f64;
            Error::OutOfMemory { op: OP, message: format!("the system gives no further {gib:.2} GiB of pinned memory") }
        };
        if !may_pin(bytes) {
            return Err(out_of_memory());
        }
        let memory = Pinned::new(bytes)
            .map_err(|status| if status.is_out_of_memory() { out_of_memory() } else { status_error(OP, status) })?;
        TAKEN.fetch_add(bytes, Ordering::AcqRel);
        Ok(self.host_memory(Memory::Own(memory)))
    }

    /// `memory`, with the device whose copies read it.
    const fn host_memory(&self, memory: Memory) -> HostMemory {
        HostMemory { memory, gpu: self.gpu, copies: self.copies }
    }

    /// `bytes` as pageable memory from which copies read.
    fn pageable(&self, bytes: Vec<u8>) -> HostMemory {
        self.copies.pageable().fetch_add(1, Ordering::AcqRel);
        self.host_memory(Memory::Pageable(bytes))
    }

    /// Whether [`start_staging`](Self::start_staging) was called on this copier.
    pub fn is_staging(&self) -> bool {
        self.is_staging.load(Ordering::Acquire)
    }

    /// Allocate pageable memory from now on. A thread copies the weights in this memory through a small ring of pinned
    /// memory.
    ///
    /// # Errors
    /// [`Error::Device`] if the system cannot start the thread.
    pub fn start_staging(&self) -> Result<()> {
        self.is_staging.store(true, Ordering::Release);
        self.copies.start_staging(self.gpu)
    }

    /// Copy `memory` to pageable memory.
    pub fn unpinned(&self, memory: &HostMemory) -> HostMemory {
        self.pageable(memory.bytes().to_vec())
    }

    /// Pin memory that other processes share. If the limit or the system does not allow this, the memory stays
    /// pageable, and a thread copies its bytes through a small ring of pinned memory.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports another error, or the system cannot start the thread.
    pub fn register(&self, pages: Pages) -> Result<Arc<Registered>> {
        self.gpu.stream().context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        let (address, size) = pages.mapping();
        // SAFETY: the mapping consists of whole pages; the `Registered` below owns it and ends the registration first.
        let is_pinned = may_pin(size)
            && match unsafe { host::register(address, size) } {
                Ok(()) => true,
                Err(status) if status.is_unpinnable() => false,
                Err(status) => return Err(status_error(OP, status)),
            };
        if is_pinned {
            TAKEN.fetch_add(size, Ordering::AcqRel);
        } else {
            self.start_staging()?;
            self.copies.pageable().fetch_add(1, Ordering::AcqRel);
        }
        Ok(Arc::new(Registered { pages, is_pinned, copies: self.copies }))
    }

    /// The bytes `range` of shared memory, as memory from which copies read.
    pub fn part(&self, registered: &Arc<Registered>, range: Range<usize>) -> HostMemory {
        self.host_memory(Memory::Shared(registered.clone(), range))
    }

    /// Queue copies to `slot` after all work that is queued now. Each of `parts` has a source, and the tensor in the
    /// slot to which the source is copied. `owner` owns the sources; a graph that contains the copies keeps the owner
    /// alive.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error, an earlier copy from pageable memory has failed, another
    /// thread records a graph, or a graph would contain a copy from pageable memory; [`Error::Argument`] if a source
    /// has more bytes than its tensor, or is in a shard that is not open.
    pub fn copy(&self, slot: usize, parts: &[(Source<'_>, Raw)], owner: &Arc<impl Any + Send + Sync>) -> Result<()> {
        recorder::check_thread(OP)?;
        let is_staged = parts.iter().any(|(from, _)| matches!(from, Source::Host(memory) if memory.is_pageable()));
        if is_staged && recorder::is_capturing_anywhere() {
            let message = "the system gives too little pinned memory for the streamed blocks, and a CUDA graph cannot copy from other \
                memory; run the step without a graph, or stream fewer blocks";
            return Err(Error::device(OP, message));
        }
        if !is_staged && let Some(staging) = self.copies.staging() {
            // The staging thread must have queued its copies to the slot before this copy is queued.
            staging.wait(self.jobs[slot].swap(0, Ordering::AcqRel))?;
        }
        // The stream of the copies, after it was made to wait for all work that the device's stream has now.
        let stream = self.copies.fork(self.gpu.stream()).map_err(|error| driver_error(OP, error))?;
        let mut job = Job { parts: Vec::new(), filled: self.filled[slot], _owner: owner.clone() };
        for (from, to) in parts {
            let size = to.elem_count() * to.dtype().size_in_bytes();
            let needed = match from {
                Source::Host(memory) => memory.bytes().len(),
                Source::Peer(_, _, range) => range.len(),
            };
            if needed > size {
                let message = format!("found a source of {needed} bytes for a tensor of {size} bytes in the slot");
                return Err(Error::argument(OP, message));
            }
            let to = address(OP, to)?;
            // All host memory of the unit, pinned or not, goes through the staging thread, which then records `filled`.
            if is_staged && let Source::Host(memory) = from {
                job.parts.push((to, Bytes { address: memory.bytes().as_ptr(), len: memory.bytes().len() }));
                continue;
            }
            // SAFETY: the slot is large enough. The source is in pinned memory or on a device. The source lives until
            // the copy is done, because its owner waits for the stream before it frees the memory.
            let queued = unsafe {
                match from {
                    Source::Host(memory) => upload::copy_pinned(to, memory.bytes().as_ptr(), needed, stream.cast()),
                    Source::Peer(shards, process, range) => {
                        peers::copy(to, shards.address(*process)? + range.start as u64, needed, stream.cast())
                    }
                }
            };
            queued.map_err(|status| status_error(OP, status))?;
        }
        // If `is_staged`, the staging thread runs: it was started before the first copy from pageable memory.
        if is_staged && let Some(staging) = self.copies.staging() {
            self.jobs[slot].store(staging.queue(job)?, Ordering::Release);
            return Ok(());
        }
        recorder::hold_source(owner);
        self.filled[slot].record(stream).map_err(|error| driver_error(OP, error))
    }

    /// Let the device's stream wait for the last copy to `slot`.
    ///
    /// # Errors
    /// [`Error::Device`] if a copy from pageable memory has failed, or the driver reports an error.
    pub fn wait(&self, slot: usize) -> Result<()> {
        if let Some(staging) = self.copies.staging() {
            staging.wait(self.jobs[slot].load(Ordering::Acquire))?;
        }
        self.filled[slot].make_wait(self.gpu.stream().cu_stream()).map_err(|error| driver_error(OP, error))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The memory of the slots is freed in the order of the device's stream, so this stream must wait for the copies
        // first. If the driver cannot queue the wait, it cannot queue the release either.
        let _ = self.copies.join(self.gpu.stream());
    }
}

/// Memory that other processes share. It is pinned in this process if the limit and the system allow it.
pub struct Registered {
    pages: Pages,
    is_pinned: bool,
    copies: &'static Copies,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let (address, size) = self.pages.mapping();
        if self.is_pinned {
            host::unregister(address);
            TAKEN.fetch_sub(size, Ordering::AcqRel);
        } else {
            self.copies.pageable().fetch_sub(1, Ordering::AcqRel);
        }
    }
}

enum Memory {
    /// Pinned memory of this process alone.
    Own(Pinned),
    /// Memory of this process alone that is not pinned.
    Pageable(Vec<u8>),
    /// A part of memory that other processes share.
    Shared(Arc<Registered>, Range<usize>),
}

/// Host memory from which copies read.
pub struct HostMemory {
    memory: Memory,
    gpu: &'static Gpu,
    copies: &'static Copies,
}

impl HostMemory {
    /// Whether the memory is not pinned.
    pub fn is_pageable(&self) -> bool {
        match &self.memory {
            Memory::Own(_) => false,
            Memory::Pageable(_) => true,
            Memory::Shared(registered, _) => !registered.is_pinned,
        }
    }

    /// The contents of the memory.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Pageable(bytes) => bytes,
            Memory::Own(own) => own.bytes(),
            Memory::Shared(registered, range) => registered.pages.bytes(range.clone()),
        }
    }

    /// Write `bytes` from byte `start` on. No copy from this memory may be queued yet. Does nothing for memory that
    /// processes share.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        let contents = match &mut self.memory {
            Memory::Own(own) => own.bytes_mut(),
            Memory::Pageable(contents) => contents,
            Memory::Shared(..) => return,
        };
        contents[start..start + bytes.len()].copy_from_slice(bytes);
    }
}

/// Wait until no copy of a device runs any more, and return true. Returns false if a copy may still run, because the
/// wait has failed or a graph is being captured: during a capture the host cannot wait for the streams.
pub(super) fn wait_for_copies(gpu: &Gpu, copies: &Copies) -> bool {
    let wait = || {
        gpu.stream().context().bind_to_thread()?;
        // SAFETY: the streams live as long as the process.
        unsafe { result::stream::synchronize(copies.stream()) }?;
        // The copies in graphs run in the device's own stream.
        // SAFETY: as above.
        unsafe { result::stream::synchronize(gpu.stream().cu_stream()) }
    };
    !recorder::is_capturing_anywhere() && wait().is_ok()
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        match &self.memory {
            Memory::Own(own) => {
                TAKEN.fetch_sub(own.len(), Ordering::AcqRel);
            }
            Memory::Pageable(_) => {
                self.copies.pageable().fetch_sub(1, Ordering::AcqRel);
            }
            Memory::Shared(..) => {}
        }
        // Pageable memory needs no wait: a job that reads it keeps it alive.
        if !self.is_pageable() && !wait_for_copies(self.gpu, self.copies) {
            // Leak the memory, which a copy may still read.
            match &mut self.memory {
                Memory::Own(own) => own.leak(),
                Memory::Pageable(_) => {}
                Memory::Shared(registered, _) => std::mem::forget(registered.clone()),
            }
        }
    }
}
