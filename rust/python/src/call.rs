//! Functions through which the bindings call the library. They convert panics to errors, and run long work without
//! holding the GIL.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use trainable_candle_core as tc;

use crate::error::{Error, Result};

/// Work over at least this many elements releases the GIL. Releasing it takes about 50 ns.
const RELEASE_FROM: usize = 8192;

/// Run `work` over about `elements` elements; large work releases the GIL.
#[inline]
pub fn compute<T: Send>(py: Python<'_>, elements: usize, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    if elements < RELEASE_FROM { quick(work) } else { detached(py, work) }
}

/// Run `work`, which copies the values of `tensor` to the host. If the values are on a GPU, the thread waits for the
/// GPU without holding the GIL.
#[inline]
pub fn reading<T: Send>(py: Python<'_>, tensor: &tc::Tensor, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    if tensor.device().is_cpu() { compute(py, tensor.elem_count(), work) } else { detached(py, work) }
}

/// Run `work` that always takes long, such as a backward pass, without the GIL.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> tc::Result<T> + Send) -> Result<T> {
    py.detach(|| quick(work))
}

/// Run `work` that is short (a view, a small tensor) or needs the GIL.
#[inline]
pub fn quick<T>(work: impl FnOnce() -> tc::Result<T>) -> Result<T> {
    // After a panic, the values of tensors are intact, because they are immutable, and poisoned locks remain usable.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(Error::Core),
        Err(payload) => Err(Error::Panic(message(&*payload))),
    }
}

#[cold]
fn message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "unknown".to_owned())
}
