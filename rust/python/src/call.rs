//! Functions through which the bindings call the library. They convert panics to errors, and release the GIL during
//! long work.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use trainable_candle_core as tc;

use crate::error::{Error, Result};

/// [`compute`] releases the GIL for work over at least this many elements. Releasing it takes about 50 ns.
const RELEASE_FROM: usize = 8192;

/// Run `work`, which takes about as long as an operation over `elements` elements, and release the GIL if it is long.
#[inline]
pub fn compute<T: Send>(py: Python<'_>, elements: usize, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    if elements < RELEASE_FROM { catch_panics(work) } else { detached(py, work) }
}

/// Run `work`, which copies the values of `tensor` to the host. If the values are on a GPU, release the GIL, because
/// the thread waits for the GPU.
#[inline]
pub fn reading<T: Send>(py: Python<'_>, tensor: &tc::Tensor, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    if tensor.device().is_cpu() { compute(py, tensor.elem_count(), work) } else { detached(py, work) }
}

/// Run `work`, which may take long, such as a backward pass, without the GIL.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    py.detach(|| catch_panics(work))
}

/// Run `work`, convert a panic to an error, and neither take nor release the GIL. Bindings call this directly for
/// `work` that is short (a view, a small tensor) or needs the GIL.
#[inline]
pub fn catch_panics<T>(work: impl FnOnce() -> tc::Result<T>) -> Result<T> {
    // Catching a panic is safe: the values of tensors are immutable and so intact, and poisoned locks remain usable.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Error::Core),
        Err(payload) => Err(Error::Panic(message(&*payload))),
    }
}

/// The message of a panic.
#[cold]
fn message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
