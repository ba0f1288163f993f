//! The modes of a thread: whether its operations are put on the tape, and whether it runs the function of a checkpoint,
//! whose operations the checkpoint either records (first run) or recomputes (backward pass).

use std::cell::Cell;
use std::marker::PhantomData;

/// The two bits that every operation reads, in one thread-local byte.
#[derive(Clone, Copy)]
pub(crate) struct Flags(u8);

const NO_GRAD: u8 = 1;
const RECORDING: u8 = 2;

impl Flags {
    /// Whether operations are put on the tape.
    pub(crate) const fn grad_enabled(self) -> bool {
        self.0 & NO_GRAD == 0
    }

    /// Whether the thread runs the function of a checkpoint, in the run that records the operations or in the run that
    /// recomputes them.
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

/// Set [`Flags::recording`] of this thread.
pub(crate) fn set_recording(on: bool) {
    MODE.set(if on { MODE.get() | RECORDING } else { MODE.get() & !RECORDING });
}

/// Whether operations of this thread are put on the tape, for a backward pass.
pub fn is_grad_enabled() -> bool {
    flags().grad_enabled()
}

/// Switch the tape on or off for this thread; returns whether it was on.
pub fn set_grad_enabled(enabled: bool) -> bool {
    let was_enabled = is_grad_enabled();
    MODE.set(if enabled { MODE.get() & !NO_GRAD } else { MODE.get() | NO_GRAD });
    was_enabled
}

/// While this guard lives, operations of its thread are not put on the tape.
#[must_use = "the tape is back in its previous mode as soon as the guard is dropped"]
pub struct NoGrad {
    /// Whether the tape was on before.
    was_enabled: bool,
    /// The mode belongs to a thread, so the guard must not move to another thread.
    _not_send: PhantomData<*const ()>,
}

impl Drop for NoGrad {
    fn drop(&mut self) {
        set_grad_enabled(self.was_enabled);
    }
}

/// Switch the tape off for this thread, until the guard is dropped.
pub fn no_grad() -> NoGrad {
    NoGrad { was_enabled: set_grad_enabled(false), _not_send: PhantomData }
}
