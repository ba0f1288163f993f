//! Recording the work of a function, and the state of a recording for other parts of the engine.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraph, CUstreamCaptureMode};
use rustc_hash::FxHashMap;
use trainable_candle_cuda::memory;
use trainable_candle_cuda::upload::{self, Constants, Known};

use super::super::gpu::{Gpu, driver_error};
use super::super::launch::{Address, Const, Element};
use super::super::memory::status_error;
use super::OP;
use crate::capture::{Effects, Run};
use crate::raw::storage_identity;
use crate::rng::State;
use crate::{Error, Raw, Result, capture};

/// Draws go forward by less than this.
pub(super) const FORWARD: u64 = 1 << 63;

/// A graph as it was recorded.
pub(super) struct Template(pub(super) CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the end of a capture, and destroyed once.
            let _ = unsafe { result::graph::destroy(self.0) };
        }
    }
}

/// A part in the memory of graphs, which goes with the last of them.
pub(super) struct Lease(&'static Gpu);

impl Drop for Lease {
    fn drop(&mut self) {
        let stream = self.0.stream();
        if stream.context().bind_to_thread().is_ok() {
            // SAFETY: the stream is the device's, which is current. If the driver cannot wait, the memory stays.
            let _ = unsafe { memory::release_graph(stream.cu_stream().cast()) };
        }
    }
}

/// What a capture on this thread needs to know.
struct Current {
    generator: Address,
    start: State,
    held: FxHashMap<usize, Raw>,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// The thread that captures, 0 if none does.
static CAPTURER: AtomicU64 = AtomicU64::new(0);

/// A capture under way; it ends when this is dropped, also after a panic.
pub(super) struct Recording {
    gpu: &'static Gpu,
    run: Option<Run>,
    lease: Option<Lease>,
    is_open: bool,
}

pub(super) struct Recorded {
    pub(super) template: Result<Template>,
    pub(super) effects: Effects,
    pub(super) held: Vec<Raw>,
    /// The memory of graphs that the recording has left in use.
    pub(super) kept: Vec<Range<Address>>,
    pub(super) constants: Constants,
    pub(super) lease: Option<Lease>,
}

impl Recording {
    pub(super) fn begin(gpu: &'static Gpu, generator: Address, start: State, known: Known) -> Result<Self> {
        let run = Run::begin(true)?;
        let stream = gpu.stream();
        stream.context().bind_to_thread().map_err(|error| driver_error(OP, error))?;
        if CAPTURER.compare_exchange(0, THREAD.with(|id| *id), Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::device(OP, "another thread captures a function; wait until it has"));
        }
        // From here on dropping it undoes what was done.
        let mut recording = Self { gpu, run: Some(run), lease: None, is_open: false };
        // SAFETY: the stream is the device's, which is current.
        unsafe { memory::begin_capture(stream.cu_stream().cast()) }.map_err(|status| status_error(OP, status))?;
        recording.lease = Some(Lease(gpu));
        CURRENT.set(Some(Current { generator, start, held: FxHashMap::default() }));
        upload::capture(known);
        // Relaxed: memory may be mapped and modules be loaded meanwhile.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is the device's, and not capturing: `CAPTURER` has one at a time.
        unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.map_err(|error| driver_error(OP, error))?;
        recording.is_open = true;
        Ok(recording)
    }

    /// End the capture on the stream.
    fn close(&mut self) -> Result<Template> {
        if !std::mem::take(&mut self.is_open) {
            return Err(Error::device(OP, "nothing is being captured"));
        }
        let end = || {
            self.gpu.stream().context().bind_to_thread()?;
            // SAFETY: the stream is capturing.
            unsafe { result::stream::end_capture(self.gpu.stream().cu_stream()) }
        };
        match end() {
            Ok(graph) if graph.is_null() => Err(Error::device(OP, "the driver has recorded nothing")),
            Ok(graph) => Ok(Template(graph)),
            Err(error) => Err(driver_error(OP, error)),
        }
    }

    pub(super) fn finish(mut self) -> Recorded {
        let template = self.close();
        let constants = upload::finish_capture();
        let held = CURRENT.take().map_or_else(Vec::new, |current| current.held.into_values().collect());
        let effects = self.run.take().map(Run::finish).unwrap_or_default();
        let stream = self.gpu.stream();
        // SAFETY: the stream is the device's, which is current on this thread since the capture began.
        let kept = unsafe { memory::kept_by_capture(stream.cu_stream().cast()) }.unwrap_or_default();
        Recorded { template, effects, held, kept, constants, lease: self.lease.take() }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Without a graph there is nothing to do with what was recorded.
        let _ = self.close();
        upload::finish_capture();
        CURRENT.take();
        let stream = self.gpu.stream();
        // SAFETY: the stream is the device's, which is current on this thread since the capture began.
        let _ = unsafe { memory::end_capture(stream.cu_stream().cast()) };
        CAPTURER.store(0, Ordering::Release);
    }
}

/// Only the thread that captures may use a device meanwhile: what others queue would become a part of the graph.
///
/// # Errors
/// [`Error::Device`] on any other thread.
pub fn check_thread(op: &'static str) -> Result<()> {
    let capturer = CAPTURER.load(Ordering::Acquire);
    if capturer == 0 || capturer == THREAD.with(|id| *id) {
        return Ok(());
    }
    Err(Error::device(op, "another thread captures a function on CUDA, and until it has, no other may use the device"))
}

/// Whether any thread captures a function.
pub fn is_capturing_anywhere() -> bool {
    CAPTURER.load(Ordering::Acquire) != 0
}

/// Keep a tensor, whose memory begins at `address`, as long as the graph that is being captured on this thread, if one is.
pub fn hold(tensor: &Raw, address: Address) {
    if !capture::is_capturing() || memory::is_of_graphs(address) {
        return;
    }
    CURRENT.with_borrow_mut(|current| {
        if let Some(current) = current {
            current.held.entry(storage_identity(tensor).0).or_insert_with(|| tensor.clone());
        }
    });
}

/// Where kernels find the generator's seed and position for draws from `state` on: in device memory (the address, or null), with the
/// position counted from there, or by value.
pub fn generator(state: State) -> (Const, State) {
    CURRENT.with_borrow(|current| match current {
        Some(Current { generator, start, .. })
            if state.seed == start.seed && state.offset.wrapping_sub(start.offset) < FORWARD =>
        {
            let place = Const::new(*generator, Element::U64);
            (place, State { seed: state.seed, offset: state.offset.wrapping_sub(start.offset) })
        }
        _ => (Const::NULL, state),
    })
}
