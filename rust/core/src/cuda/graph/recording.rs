//! [`Recording`]: captures the work that a function queues in the device's stream, and collects what the graph needs.

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraph, CUstreamCaptureMode};
use trainable_candle_cuda::memory;
use trainable_candle_cuda::upload::{self, Constants, Known};

use super::super::error::{driver_error, status_error};
use super::super::gpu::Gpu;
use super::super::launch::Address;
use super::super::recorder::{self, Held};
use super::OP;
use crate::capture::{Effects, Run};
use crate::rng::state::State;
use crate::{Error, Result};

/// The driver's graph that a capture has recorded. An executable graph is made from it.
pub(super) struct Template(pub(super) CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the end of a capture has made the graph, which is destroyed once. An error is ignored, because
            // nothing can be done about it here.
            let _ = unsafe { result::graph::destroy(self.0) };
        }
    }
}

/// Keeps the memory of graphs (the pool for the temporaries of all graphs of a device) allocated. Each call of
/// `memory::begin_capture` is the start of one lease. Dropping the last lease of a device releases the memory.
pub(super) struct Lease(&'static Gpu);

impl Drop for Lease {
    fn drop(&mut self) {
        let stream = self.0.stream();
        if stream.context().bind_to_thread().is_ok() {
            // SAFETY: the stream is the device's, and the device is current. An error is ignored; the memory then stays
            // allocated.
            let _ = unsafe { memory::release_graph(stream.cu_stream().cast()) };
        }
    }
}

/// A capture in progress. The capture ends when this object is dropped, even by a panic.
pub(super) struct Recording {
    gpu: &'static Gpu,
    /// Collects the effects on the host; `None` after [`finish`](Self::finish).
    run: Option<Run>,
    /// `None` until the memory of graphs is in use, and after [`finish`](Self::finish).
    lease: Option<Lease>,
    /// Whether the stream is capturing.
    is_open: bool,
}

/// What a capture has collected.
pub(super) struct Recorded {
    pub(super) template: Result<Template>,
    /// What the function changes on the host, and what host state its work depends on.
    pub(super) effects: Effects,
    /// The tensors that the recorded work uses outside of the memory of graphs.
    pub(super) held: Held,
    /// The blocks of the memory of graphs that tensors still use after the capture.
    pub(super) kept: Vec<Range<Address>>,
    /// The values from the CPU that the recorded work reads.
    pub(super) constants: Constants,
    /// Keeps the memory of graphs.
    pub(super) lease: Option<Lease>,
}

impl Recording {
    /// Begin a capture on this thread. `start` is the state of the random number generator when the capture begins. The
    /// function's draws that continue from `start` (the same seed, the same or a later position) read the generator's
    /// state at the address `generator` when the graph runs. `known` are the fingerprints of the values that the
    /// function copied from the CPU in an eager run; copies of other values are rejected.
    ///
    /// # Errors
    /// [`Error::Device`] if another captured function runs on this thread, another thread captures, or the driver
    /// reports an error.
    pub(super) fn begin(gpu: &'static Gpu, generator: Address, start: State, known: Known) -> Result<Self> {
        let run = Run::begin(/* capturing: */ true)?;
        let stream = gpu.stream();
        stream.context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        recorder::claim(OP)?;
        // From here on, dropping the recording undoes the steps that were done.
        let mut recording = Self { gpu, run: Some(run), lease: None, is_open: false };
        // SAFETY: the stream is the device's, and the device is current.
        unsafe { memory::begin_capture(stream.cu_stream().cast()) }.map_err(|status| status_error(OP, status))?;
        recording.lease = Some(Lease(gpu));
        recorder::begin(generator, start);
        upload::capture(known);
        // The stream waits now for the copies that the device's second stream makes, because captured work cannot wait
        // for work outside of the capture.
        gpu.meet_copies().map_err(|error| driver_error(OP, error))?;
        // The mode is relaxed, because the function may map memory and load modules during the capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is the device's, and not capturing, because `recorder::claim` allows one capture at a
        // time.
        unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.map_err(|error| driver_error(OP, error))?;
        recording.is_open = true;
        Ok(recording)
    }

    /// End the capture of the stream.
    fn close(&mut self) -> Result<Template> {
        if !std::mem::take(&mut self.is_open) {
            return Err(Error::device(OP, "nothing is being captured"));
        }
        let end = || {
            self.gpu.stream().context().bind_to_thread()?;
            // The stream waits for the captured copies of the second stream, because a capture can end only after all
            // streams that took part have joined the stream in which it began.
            let met = self.gpu.meet_copies();
            // SAFETY: the stream is capturing.
            let graph = unsafe { result::stream::end_capture(self.gpu.stream().cu_stream()) };
            met.and(graph)
        };
        match end() {
            Ok(graph) if graph.is_null() => Err(Error::device(OP, "the driver has recorded nothing")),
            Ok(graph) => Ok(Template(graph)),
            Err(error) => Err(driver_error(OP, error)),
        }
    }

    /// End the capture, and return what it has collected.
    pub(super) fn finish(mut self) -> Recorded {
        let template = self.close();
        let constants = upload::finish_capture();
        let held = recorder::end();
        let effects = self.run.take().map(Run::finish).unwrap_or_default();
        let stream = self.gpu.stream();
        // SAFETY: the stream is the device's. The device has been current on this thread since the capture began.
        let kept = unsafe { memory::kept_by_capture(stream.cu_stream().cast()) }.unwrap_or_default();
        Recorded { template, effects, held, kept, constants, lease: self.lease.take() }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // If `finish` was not called, the recorded work is discarded here. Otherwise `finish` has made the
        // next three calls already, and they find nothing to do.
        let _ = self.close();
        upload::finish_capture();
        recorder::end();
        let stream = self.gpu.stream();
        // SAFETY: the stream is the device's. The device has been current on this thread since the capture began.
        let _ = unsafe { memory::end_capture(stream.cu_stream().cast()) };
        recorder::release();
    }
}
