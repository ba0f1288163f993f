//! Copies from pinned memory of the host on a stream of their own, beside the work of the device's stream.
//!
//! Events order the two streams: a copy begins when all work queued before it is done, and work that needs it waits for its end. In a
//! capture the same events fork the stream of copies off the captured one and join it again, and the copies become nodes of the graph.
//! An event of eager work cannot be waited for in a capture, nor the other way round, so both streams meet where a recording or a
//! replay begins and ends; from there on nobody knows what was copied, which is what [`Copier::epoch`] tells.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};
use trainable_candle_cuda::host::Pinned as Memory;
use trainable_candle_cuda::upload;

use super::error::{driver_error, status_error};
use super::gpu::Gpu;
use super::launch::address;
use super::recorder;
use crate::{Error, Raw, Result, capture};

const OP: &str = "stream_blocks";

/// An event; it lives as long as the process.
struct Event(CUevent);

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new() -> std::result::Result<Self, DriverError> {
        result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Self)
    }

    fn record(&self, stream: CUstream) -> std::result::Result<(), DriverError> {
        // SAFETY: event and stream live as long as the process.
        unsafe { result::event::record(self.0, stream) }
    }

    fn before(&self, stream: CUstream) -> std::result::Result<(), DriverError> {
        // SAFETY: as above.
        unsafe { result::stream::wait_event(stream, self.0, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
    }
}

/// The stream of a device's copies. There is one, because copies share the bus; it lives as long as the process.
pub(super) struct Copies {
    stream: CUstream,
    /// Recorded on the device's stream before a copy.
    forked: Event,
    /// Recorded on the stream of copies where the device's stream waits for all of them.
    joined: Event,
    is_ahead: AtomicBool,
    epoch: AtomicU64,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Copies {}
// SAFETY: as above.
unsafe impl Sync for Copies {}

impl Copies {
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let make = || {
            gpu.stream().context().bind_to_thread()?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok(Self {
                stream,
                forked: Event::new()?,
                joined: Event::new()?,
                is_ahead: AtomicBool::new(false),
                epoch: AtomicU64::new(0),
            })
        };
        make().map_err(|error| driver_error(OP, error))
    }

    /// Let the device's stream wait for all copies.
    fn join(&self, gpu: &Gpu) -> std::result::Result<(), DriverError> {
        if self.is_ahead.swap(false, Ordering::AcqRel) {
            gpu.stream().context().bind_to_thread()?;
            self.joined.record(self.stream)?;
            self.joined.before(gpu.stream().cu_stream())?;
        }
        Ok(())
    }

    /// As [`join`](Self::join), where a recording or a replay begins or ends: what was copied before counts no more.
    pub(super) fn meet(&self, gpu: &Gpu) -> std::result::Result<(), DriverError> {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.join(gpu)
    }
}

/// Copies to some slots of a device.
pub struct Copier {
    gpu: &'static Gpu,
    copies: &'static Copies,
    /// Of each slot, after its last copy.
    filled: Vec<Event>,
}

impl Copier {
    /// For so many slots.
    ///
    /// # Errors
    /// [`Error::Device`] if it is not a CUDA device, or the driver refuses.
    pub fn new(device: &Device, slots: usize) -> Result<Self> {
        let gpu = Gpu::of_device(OP, device)?;
        capture::refuse(OP)?;
        let copies = gpu.copies()?;
        let filled = (0..slots).map(|_| Event::new()).collect::<std::result::Result<_, _>>();
        Ok(Self { gpu, copies, filled: filled.map_err(|error| driver_error(OP, error))? })
    }

    /// What is in the slots is known while this number stays the same.
    pub fn epoch(&self) -> u64 {
        self.copies.epoch.load(Ordering::Acquire)
    }

    /// Pinned memory of the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the system gives no more.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let bind = || self.gpu.stream().context().bind_to_thread();
        bind().map_err(|error| driver_error(OP, error))?;
        let memory = Memory::new(bytes).map_err(|status| {
            if status.is_out_of_memory() {
                let gib = bytes as f64 / (1u64 << 30) as f64;
                let message = format!(
                    "the system gives no further {gib:.2} GiB of pinned memory, which streamed blocks lie in; stream fewer blocks, or \
                     quantize the base (under WSL2 a .wslconfig with more memory raises the limit)"
                );
                return Error::OutOfMemory { op: OP, message };
            }
            status_error(OP, status)
        })?;
        Ok(Pinned { memory, gpu: self.gpu, copies: self.copies })
    }

    /// Queue copies to `slot` behind all work that is queued now. `owner` owns their sources, and lives as long as a graph with them.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses, or another thread captures.
    pub fn copy(&self, slot: usize, parts: &[(&Pinned, &Raw)], owner: &Arc<impl Any + Send + Sync>) -> Result<()> {
        recorder::check_thread(OP)?;
        let (compute, copies) = (self.gpu.stream().cu_stream(), self.copies.stream);
        let fork = || {
            self.gpu.stream().context().bind_to_thread()?;
            self.copies.forked.record(compute)?;
            self.copies.forked.before(copies)
        };
        fork().map_err(|error| driver_error(OP, error))?;
        self.copies.is_ahead.store(true, Ordering::Release);
        for (from, to) in parts {
            let size = to.elem_count() * to.dtype().size_in_bytes();
            let bytes = from.bytes();
            if bytes.len() > size {
                return Err(Error::argument(OP, "a unit is larger than its slot"));
            }
            let to = address(OP, to)?;
            // SAFETY: the slot is as large; the source is pinned, and stays until the copy is done: its owner waits for the stream.
            unsafe { upload::copy_pinned(to, bytes.as_ptr(), bytes.len(), copies.cast()) }
                .map_err(|status| status_error(OP, status))?;
        }
        recorder::hold_source(owner);
        self.filled[slot].record(copies).map_err(|error| driver_error(OP, error))
    }

    /// Let the device's stream wait for the last copy to `slot`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses.
    pub fn wait(&self, slot: usize) -> Result<()> {
        self.filled[slot].before(self.gpu.stream().cu_stream()).map_err(|error| driver_error(OP, error))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The slots are released in the order of the device's stream. If the driver cannot wait, nothing is released before it can.
        let _ = self.copies.join(self.gpu);
    }
}

/// Pinned memory of the host that copies read.
pub struct Pinned {
    memory: Memory,
    gpu: &'static Gpu,
    copies: &'static Copies,
}

impl Pinned {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// Set bytes from `start` on, before anything is copied.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        self.memory.bytes_mut()[start..start + bytes.len()].copy_from_slice(bytes);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let wait = || {
            self.gpu.stream().context().bind_to_thread()?;
            // SAFETY: the streams live as long as the process.
            unsafe { result::stream::synchronize(self.copies.stream) }?;
            // SAFETY: as above. Graphs copy in the device's stream.
            unsafe { result::stream::synchronize(self.gpu.stream().cu_stream()) }
        };
        // Without knowing that nothing reads it, it must stay: while a function is captured nothing can wait.
        if recorder::is_capturing_anywhere() || wait().is_err() {
            self.memory.leak();
        }
    }
}

/// The stream of copies of a device, made when it is first asked for.
pub(super) struct Lazy(Mutex<Option<&'static Copies>>);

impl Lazy {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// If it is there.
    pub(super) fn get(&self) -> Option<&'static Copies> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get_or_make(&self, gpu: &Gpu) -> Result<&'static Copies> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copies) = *known {
            return Ok(copies);
        }
        Ok(known.insert(Box::leak(Box::new(Copies::new(gpu)?))))
    }
}
