//! [`GradientSlot`]: a variable's gradient, and the record of each access to the gradient.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::effects::{Place, Slot, note_gradient, note_read};
use crate::Result;

/// The operations that captures need from a gradient.
pub(crate) trait Settle: Send + 'static {
    /// Accumulate the gradient in a fixed buffer from now on, starting with the gradient's present value. Returns false
    /// if the gradient already accumulates in a fixed buffer.
    fn settle(&mut self) -> Result<bool>;

    /// The storage of the gradient, if there is one.
    fn place(&self) -> Option<Place>;

    /// Whether the gradient has a value.
    fn is_filled(&self) -> bool;

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

/// A gradient, accessed through methods that report the access to captures. A replay changes the same gradients as the
/// function, in the same storage. A graph is stale when a gradient that it reads has moved.
pub(crate) struct GradientSlot<T>(Arc<Mutex<T>>);

impl<T: Settle> GradientSlot<T> {
    pub(crate) fn new(state: T) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    /// Locks the gradient to queue work that depends on whether there is a gradient, and on where its storage is.
    pub(crate) fn read(&self) -> impl Deref<Target = T> {
        let state = lock(&self.0);
        note_read(|| self.0.clone(), || state.place());
        state
    }

    /// Locks the gradient for a change that does not depend on its present storage.
    pub(crate) fn change(&self) -> MutexGuard<'_, T> {
        note_gradient(|| self.0.clone());
        lock(&self.0)
    }

    /// Locks the gradient for a read that does not influence queued work.
    pub(crate) fn peek(&self) -> impl Deref<Target = T> {
        lock(&self.0)
    }
}
