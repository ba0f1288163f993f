//! Copies from pinned host memory, or from other devices, on a separate stream, in parallel with the work of the
//! device's stream.
//!
//! Events order the two streams (see `copies.rs`): a copy begins when all work queued before it is done, and work that
//! reads the copied values waits for the end of the copy.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::result;
use trainable_candle_cuda::host::{self, Pinned as Own};
use trainable_candle_cuda::{peers, upload};

use super::copies::{Copies, Event};
use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::peers::Shards;
use super::recorder;
use crate::streaming::Pages;
use crate::{Error, Raw, Result, capture};

const OP: &str = "stream_blocks";

/// What a copy reads.
pub enum Source<'a> {
    /// Memory of the host.
    Host(&'a Pinned),
    /// Some bytes of the shard of a process of the machine.
    Peer(&'a Shards, usize, Range<usize>),
}

/// Copies to some slots of a device.
pub struct Copier {
    gpu: &'static Gpu,
    copies: &'static Copies,
    /// One event per slot, recorded after its last copy.
    filled: Vec<Event>,
}

impl Copier {
    /// A copier for `slots` slots.
    ///
    /// # Errors
    /// [`Error::Device`] if it is not a CUDA device, or the driver reports an error.
    pub fn new(device: &Device, slots: usize) -> Result<Self> {
        let gpu = Gpu::of_device(OP, device)?;
        capture::refuse(OP)?;
        let copies = gpu.copies()?;
        let filled = (0..slots).map(|_| Event::new()).collect::<std::result::Result<_, _>>();
        Ok(Self { gpu, copies, filled: filled.map_err(|error| driver_error(OP, error))? })
    }

    /// A number that changes whenever the recording or a replay of a graph begins or ends. After such a change, the contents
    /// of the slots are not known.
    pub fn epoch(&self) -> u64 {
        self.copies.epoch()
    }

    /// Allocate pinned host memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives no more.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let bind = || self.gpu.stream().context().bind_to_thread();
        bind().map_err(|error| driver_error(OP, error))?;
        let memory = Own::new(bytes).map_err(|status| {
            if status.is_out_of_memory() {
                let gib = bytes as f64 / (1u64 << 30) as f64;
                let message = format!(
                    "the system cannot provide another {gib:.2} GiB of pinned memory for streamed blocks; stream fewer blocks, or \
                     quantize the base (under WSL2 a .wslconfig with more memory raises the limit)"
                );
                return Error::OutOfMemory { op: OP, message };
            }
            status_error(OP, status)
        })?;
        Ok(Pinned { memory: Memory::Own(memory), gpu: self.gpu, copies: self.copies })
    }

    /// Pin memory that other processes share.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system does not let the driver pin as much.
    pub fn register(&self, pages: Pages) -> Result<Arc<Registered>> {
        let bind = || self.gpu.stream().context().bind_to_thread();
        bind().map_err(|error| driver_error(OP, error))?;
        let (address, size) = pages.mapping();
        // SAFETY: the mapping is whole pages, and lives as long as the registration, which owns it.
        unsafe { host::register(address, size) }.map_err(|status| {
            if status.is_out_of_memory() {
                let gib = size as f64 / (1u64 << 30) as f64;
                let message = format!(
                    "the driver cannot pin the {gib:.2} GiB of memory that processes share for streamed blocks; raise the memory limit of \
                     the container or `ulimit -l`, stream fewer blocks, or quantize the base"
                );
                return Error::OutOfMemory { op: OP, message };
            }
            status_error(OP, status)
        })?;
        Ok(Arc::new(Registered(pages)))
    }

    /// A part of shared memory.
    pub fn part(&self, registered: &Arc<Registered>, range: Range<usize>) -> Pinned {
        Pinned { memory: Memory::Shared(registered.clone(), range), gpu: self.gpu, copies: self.copies }
    }

    /// Queue copies to `slot` after all work that is queued now. `owner` owns the sources; a graph that contains the
    /// copies keeps the owner alive.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error, or another thread records a graph.
    pub fn copy(&self, slot: usize, parts: &[(Source<'_>, Raw)], owner: &Arc<impl Any + Send + Sync>) -> Result<()> {
        recorder::check_thread(OP)?;
        let copies = self.copies.fork(self.gpu.stream()).map_err(|error| driver_error(OP, error))?;
        for (from, to) in parts {
            let size = to.elem_count() * to.dtype().size_in_bytes();
            let needed = match from {
                Source::Host(pinned) => pinned.bytes().len(),
                Source::Peer(_, _, range) => range.len(),
            };
            if needed > size {
                return Err(Error::argument(OP, "a unit is larger than its slot"));
            }
            let to = address(OP, to)?;
            // SAFETY: the slot is large enough. The source is in pinned memory or on a device. It lives until the copy is
            // done, because its owner waits for the stream.
            let queued = unsafe {
                match from {
                    Source::Host(pinned) => upload::copy_pinned(to, pinned.bytes().as_ptr(), needed, copies.cast()),
                    Source::Peer(shards, process, range) => {
                        peers::copy(to, shards.address(*process)? + range.start as u64, needed, copies.cast())
                    }
                }
            };
            queued.map_err(|status| status_error(OP, status))?;
        }
        recorder::hold_source(owner);
        self.filled[slot].record(copies).map_err(|error| driver_error(OP, error))
    }

    /// Let the device's stream wait for the last copy to `slot`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver reports an error.
    pub fn wait(&self, slot: usize) -> Result<()> {
        self.filled[slot].before(self.gpu.stream().cu_stream()).map_err(|error| driver_error(OP, error))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The memory of the slots is freed in the order of the device's stream, so this stream must wait for the copies
        // first. If the driver cannot queue the wait, it cannot queue the release either.
        let _ = self.copies.join(self.gpu.stream());
    }
}

/// Memory that other processes share, pinned in this one.
pub struct Registered(Pages);

impl Drop for Registered {
    fn drop(&mut self) {
        host::unregister(self.0.mapping().0);
    }
}

enum Memory {
    /// Memory of this process alone.
    Own(Own),
    /// A part of memory that other processes share.
    Shared(Arc<Registered>, Range<usize>),
}

/// Pinned host memory from which copies read.
pub struct Pinned {
    memory: Memory,
    gpu: &'static Gpu,
    copies: &'static Copies,
}

impl Pinned {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Own(own) => own.bytes(),
            Memory::Shared(registered, range) => registered.0.bytes(range.clone()),
        }
    }

    /// Write `bytes` from offset `start` on, before anything is copied. Does nothing for memory that processes
    /// share.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        if let Memory::Own(own) = &mut self.memory {
            own.bytes_mut()[start..start + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// Wait until no copy of a device runs any more. Returns false if a copy may still read its source: during a capture it
/// is not possible to wait.
pub(super) fn is_over(gpu: &Gpu, copies: &Copies) -> bool {
    let wait = || {
        gpu.stream().context().bind_to_thread()?;
        // SAFETY: the streams live as long as the process.
        unsafe { result::stream::synchronize(copies.stream()) }?;
        // SAFETY: as above. Graphs copy in the device's stream.
        unsafe { result::stream::synchronize(gpu.stream().cu_stream()) }
    };
    !recorder::is_capturing_anywhere() && wait().is_ok()
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !is_over(self.gpu, self.copies) {
            // Leak the memory, which a copy may still read.
            match &mut self.memory {
                Memory::Own(own) => own.leak(),
                Memory::Shared(registered, _) => std::mem::forget(registered.clone()),
            }
        }
    }
}
