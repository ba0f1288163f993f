//! The state of the capture of a CUDA graph in progress: the memory that the graph uses, the state of the random
//! generator, and which thread captures.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;
use trainable_candle_cuda::kernels::{Const, Element};
use trainable_candle_cuda::memory;
use trainable_candle_cuda::structs::Address;

use crate::raw::storage_identity;
use crate::rng::state::State;
use crate::{Error, Raw, Result, capture};

/// If a generator's position (`State::offset`) now minus an earlier position, modulo 2^64, is below this number, the
/// generator has advanced or stayed; otherwise the generator was set back.
pub const FORWARD: u64 = 1 << 63;

/// The state of the capture on this thread.
struct Current {
    /// The address of the generator's state in device memory.
    generator: Address,
    /// The generator's state at which the capture began.
    start: State,
    /// The tensors that the graph reads or writes, by the address of their storage on the host.
    held: FxHashMap<usize, Raw>,
    /// The owners of the host memory that the graph reads or writes.
    sources: Vec<Arc<dyn Any + Send + Sync>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
    /// A number of this thread, at least 1.
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// The number of the thread that captures, 0 if none does.
static CAPTURER: AtomicU64 = AtomicU64::new(0);

/// Reserve capturing for this thread, until [`release`].
///
/// # Errors
/// [`Error::Device`] if another thread captures.
pub fn claim(op: &'static str) -> Result<()> {
    match CAPTURER.compare_exchange(0, THREAD.with(|id| *id), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::device(op, "another thread captures a function; wait until its capture ends")),
    }
}

/// Begin a capture. Its draws with the seed of `start`, at the position of `start` or later, read the generator's state
/// at the address `generator` when the graph runs.
pub fn begin(generator: Address, start: State) {
    CURRENT.set(Some(Current { generator, start, held: FxHashMap::default(), sources: Vec::new() }));
}

/// The tensors and host memory that a graph reads or writes, kept as long as the graph.
#[derive(Default)]
pub struct Held {
    _tensors: Vec<Raw>,
    _sources: Vec<Arc<dyn Any + Send + Sync>>,
}

/// End the capture; returns the memory that the graph reads or writes.
pub fn end() -> Held {
    let held = |current: Current| Held { _tensors: current.held.into_values().collect(), _sources: current.sources };
    CURRENT.take().map_or_else(Held::default, held)
}

/// Allow other threads to capture again.
pub fn release() {
    CAPTURER.store(0, Ordering::Release);
}

/// Return an error if another thread captures: work that this thread queued would become a part of the other thread's
/// graph.
///
/// # Errors
/// [`Error::Device`] if another thread captures.
pub fn check_thread(op: &'static str) -> Result<()> {
    let capturer = CAPTURER.load(Ordering::Acquire);
    if capturer == 0 || capturer == THREAD.with(|id| *id) {
        return Ok(());
    }
    Err(Error::device(op, "another thread captures a function on CUDA; wait until its capture ends"))
}

/// Whether any thread captures a function.
pub fn is_capturing_anywhere() -> bool {
    CAPTURER.load(Ordering::Acquire) != 0
}

/// Keep a tensor alive as long as the graph that is being captured on this thread. The memory of the tensor begins at
/// `address`. Does nothing if this thread does not capture, or if the memory is reserved for graphs anyway.
pub fn hold(tensor: &Raw, address: Address) {
    if !capture::is_capturing() || memory::is_of_graphs(address) {
        return;
    }
    CURRENT.with_borrow_mut(|current| {
        if let Some(current) = current {
            let (storage_address, _size) = storage_identity(tensor);
            current.held.entry(storage_address).or_insert_with(|| tensor.clone());
        }
    });
}

/// Keep the owner of host memory alive as long as the graph that is being captured on this thread. Does nothing if this
/// thread does not capture.
pub fn hold_source(owner: &Arc<impl Any + Send + Sync>) {
    if !capture::is_capturing() {
        return;
    }
    CURRENT.with_borrow_mut(|current| {
        if let Some(current) = current
            && !current.sources.iter().any(|known| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(owner)))
        {
            current.sources.push(owner.clone());
        }
    });
}

/// Where kernels find the generator's seed and position for draws from `state` on. If the returned address is null, the
/// returned state has the seed and the position. Otherwise the address is that of a state in device memory, and the
/// returned position is relative to the position in that state.
pub fn generator(state: State) -> (Const, State) {
    CURRENT.with_borrow(|current| match current {
        Some(Current { generator, start, .. })
            if state.seed == start.seed && state.offset.wrapping_sub(start.offset) < FORWARD =>
        {
            let address = Const::new(*generator, Element::U64);
            (address, State { seed: state.seed, offset: state.offset.wrapping_sub(start.offset) })
        }
        _ => (Const::NULL, state),
    })
}
