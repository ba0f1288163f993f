//! The thread's recording mode: whether operations are put on the tape, and whether a checkpoint records them.

use std::cell::Cell;
use std::marker::PhantomData;

/// The two bits that every operation reads, in one thread-local byte.
#[derive(Clone, Copy)]
pub(crate) struct Flags(u8);

const NO_GRAD: u8 = 1;
const RECORDING: u8 = 2;

impl Flags {
    pub(crate) const fn grad_enabled(self) -> bool {
        self.0 & NO_GRAD == 0
    }

    pub(crate) const fn recording(self) -> bool {
        self.0 & RECORDING != 0
    }
}

thread_local! {
    static MODE: Cell<u8> = const { Cell::new(0) };
}

pub(crate) fn flags() -> Flags {
    Flags(MODE.get())
}

pub(crate) fn set_recording(on: bool) {
    MODE.set(if on { MODE.get() | RECORDING } else { MODE.get() & !RECORDING });
}

/// Whether operations of this thread are recorded for a backward pass.
pub fn is_grad_enabled() -> bool {
    flags().grad_enabled()
}

/// Switch the tape's recording on or off for this thread; returns the previous state.
pub fn set_grad_enabled(enabled: bool) -> bool {
    let was = is_grad_enabled();
    MODE.set(if enabled { MODE.get() & !NO_GRAD } else { MODE.get() | NO_GRAD });
    was
}

/// While this guard lives, its thread records nothing on the tape.
#[must_use = "recording is on again as soon as the guard is dropped"]
pub struct NoGrad {
    was: bool,
    /// The mode belongs to a thread, so the guard must stay on it.
    _not_send: PhantomData<*const ()>,
}

impl Drop for NoGrad {
    fn drop(&mut self) {
        set_grad_enabled(self.was);
    }
}

/// Switch the tape's recording off for this thread, until the guard is dropped.
pub fn no_grad() -> NoGrad {
    NoGrad { was: set_grad_enabled(false), _not_send: PhantomData }
}
