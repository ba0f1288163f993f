//! The stream of copies of each device: copies between the device and pinned memory, and copies from other devices.
//! Events order this stream with the compute stream, which runs all other work of the device.
//!
//! While a CUDA graph is captured, the same events fork the stream of copies off the captured compute stream and join
//! it again, and the copies become nodes of the graph. Captured work cannot wait for an event of eager work, and eager
//! work cannot wait for an event of captured work. So the two streams are joined (they "meet") where a recording (a
//! capture) begins, where it ends, and where a replay begins. A replay may overwrite what earlier copies have written,
//! because the copies in the graph may have the same destinations. So after a meeting, code that has made copies must
//! assume that their destinations have changed; [`Copies::epoch`] counts the meetings.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, result};

use super::error::driver_error;
use super::gpu::Gpu;
use super::staging::Staging;
use crate::Result;

/// An event of the driver. It lives as long as the process.
#[derive(Clone, Copy)]
pub(super) struct Event(CUevent);

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new() -> std::result::Result<Self, DriverError> {
        result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Self)
    }

    /// Record the event in `stream`: it completes when the work that is queued there now is done.
    pub(super) fn record(&self, stream: CUstream) -> std::result::Result<(), DriverError> {
        // SAFETY: event and stream live as long as the process.
        unsafe { result::event::record(self.0, stream) }
    }

    /// Make work that is queued in `stream` from now on wait for the event.
    pub(super) fn make_wait(&self, stream: CUstream) -> std::result::Result<(), DriverError> {
        // SAFETY: as in `record`.
        unsafe { result::stream::wait_event(stream, self.0, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
    }
}

/// The stream of a device's copies. One stream is enough, because all copies share the bus. The stream lives as long as
/// the process.
pub(super) struct Copies {
    stream: CUstream,
    /// Recorded in the compute stream before a copy; the stream of copies then waits for the event.
    forked: Event,
    /// Recorded in the stream of copies; the compute stream then waits for the event, and so for all copies.
    joined: Event,
    /// Whether copies may have been queued since the compute stream last waited for all copies.
    is_ahead: AtomicBool,
    /// The number of meetings (see the top of this file).
    epoch: AtomicU64,
    /// The thread that copies from pageable memory, if it was started.
    staging: OnceLock<Staging>,
    /// The number of buffers of streamed weights that are in pageable memory.
    pageable: AtomicUsize,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Copies {}
// SAFETY: as above.
unsafe impl Sync for Copies {}

impl Copies {
    pub(super) fn new(compute: &CudaStream) -> Result<Self> {
        let make = || {
            compute.context().bind_to_thread()?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok(Self {
                stream,
                forked: Event::new()?,
                joined: Event::new()?,
                is_ahead: AtomicBool::new(false),
                epoch: AtomicU64::new(0),
                staging: OnceLock::new(),
                pageable: AtomicUsize::new(0),
            })
        };
        // Errors have the name of the operation that streams the weights of blocks, the main user of these copies.
        make().map_err(|error| driver_error("stream_blocks", error))
    }

    /// Return the stream itself.
    pub(super) const fn stream(&self) -> CUstream {
        self.stream
    }

    /// Return the thread that copies from pageable memory, if it was started.
    pub(super) fn staging(&self) -> Option<&Staging> {
        self.staging.get()
    }

    /// Return the number of buffers of streamed weights that are in pageable memory. The owners of the buffers change
    /// it.
    pub(super) const fn pageable(&self) -> &AtomicUsize {
        &self.pageable
    }

    /// Start the thread that copies from pageable memory, unless it was started already.
    pub(super) fn start_staging(&self, gpu: &'static Gpu) -> Result<()> {
        if self.staging.get().is_none() {
            // If another thread has started one meanwhile, this one ends.
            drop(self.staging.set(Staging::new(gpu, self.stream)?));
        }
        Ok(())
    }

    /// Return the number of meetings. While it stays the same, no replay has overwritten what copies have written.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Let copies that are queued from now on wait for the work that is queued in the compute stream now. Returns the
    /// stream in which to queue the copies.
    pub(super) fn fork(&self, compute: &CudaStream) -> std::result::Result<CUstream, DriverError> {
        compute.context().bind_to_thread()?;
        self.forked.record(compute.cu_stream())?;
        self.forked.make_wait(self.stream)?;
        self.is_ahead.store(true, Ordering::Release);
        Ok(self.stream)
    }

    /// Let the compute stream wait for all copies. Blocks until the staging thread has queued its copies.
    pub(super) fn join(&self, compute: &CudaStream) -> std::result::Result<(), DriverError> {
        if let Some(staging) = self.staging() {
            // An error is ignored here: `Copier::wait` returns it where the destination of the failed copy is used.
            let _ = staging.wait_for_all();
        }
        if self.is_ahead.swap(false, Ordering::AcqRel) {
            compute.context().bind_to_thread()?;
            self.joined.record(self.stream)?;
            self.joined.make_wait(compute.cu_stream())?;
        }
        Ok(())
    }

    /// Do what [`join`](Self::join) does, and count a meeting. To be called where a recording begins, where it ends,
    /// and where a replay begins.
    pub(super) fn meet(&self, compute: &CudaStream) -> std::result::Result<(), DriverError> {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.join(compute)
    }
}

/// The [`Copies`] of a device, made on first use.
pub(super) struct Lazy(Mutex<Option<&'static Copies>>);

impl Lazy {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Return the [`Copies`], if they were made.
    pub(super) fn get(&self) -> Option<&'static Copies> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the [`Copies`]; make them first if there are none.
    pub(super) fn get_or_make(&self, compute: &CudaStream) -> Result<&'static Copies> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copies) = *made {
            return Ok(copies);
        }
        Ok(made.insert(Box::leak(Box::new(Copies::new(compute)?))))
    }
}
