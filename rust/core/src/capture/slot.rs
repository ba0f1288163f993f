//! [`GradientSlot`]: a variable's gradient, which reports its accesses to the capture of a CUDA graph, if one runs. It
//! does not report a read that does not influence queued work.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::effects::{Place, Slot, note_gradient, note_read};
use crate::Result;

/// The operations that captures need from a gradient.
pub(crate) trait Settle: Send + 'static {
    /// Accumulates the gradient in a fixed buffer from now on, starting with the gradient's present value. Returns
    /// false if the gradient already accumulates in a fixed buffer.
    fn settle(&mut self) -> Result<bool>;

    /// The storage of the gradient, if there is one.
    fn place(&self) -> Option<Place>;

    /// Whether the fixed buffer holds a gradient; false if there is no buffer.
    fn is_filled(&self) -> bool;

    /// Marks the fixed buffer as holding a gradient, or as empty.
    fn set_filled(&mut self, filled: bool);
}

impl<T: Settle> Slot for Mutex<T> {
    fn settle(&self) -> Result<bool> {
        lock(self).settle()
    }

    fn place(&self) -> Option<Place> {
        lock(self).place()
    }

    fn is_filled(&self) -> bool {
        lock(self).is_filled()
    }

    fn set_filled(&self, filled: bool) {
        lock(self).set_filled(filled);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A gradient, accessed through methods. All of them except `peek` report the access to captures. A replay changes the
/// same gradients as the captured function, in the same storage. A graph is stale (it must be recorded again) when a
/// gradient that it reads was added, removed or moved.
pub(crate) struct GradientSlot<T>(Arc<Mutex<T>>);

impl<T: Settle> GradientSlot<T> {
    pub(crate) fn new(gradient: T) -> Self {
        Self(Arc::new(Mutex::new(gradient)))
    }

    /// Locks the gradient to queue work that depends on whether there is a gradient, and on where its storage is.
    pub(crate) fn read(&self) -> impl Deref<Target = T> {
        let gradient = lock(&self.0);
        note_read(|| self.0.clone(), || gradient.place());
        gradient
    }

    /// Locks the gradient for a change that does not depend on its present storage.
    pub(crate) fn change(&self) -> MutexGuard<'_, T> {
        note_gradient(|| self.0.clone());
        lock(&self.0)
    }

    /// Locks the gradient for a read that does not influence queued work, and is not reported.
    pub(crate) fn peek(&self) -> impl Deref<Target = T> {
        lock(&self.0)
    }
}
