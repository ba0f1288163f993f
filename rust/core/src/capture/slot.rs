//! [`GradientSlot`]: what collects a variable's gradient.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::effects::{Place, Slot, note_gradient, note_read};
use crate::Result;

/// The state of a gradient, as far as captures know it.
pub(crate) trait Settle: Send + 'static {
    /// Collect gradients in place from now on, in a buffer that has what there is. False if they are already.
    fn settle(&mut self) -> Result<bool>;

    /// Where the gradient is, if there is one.
    fn place(&self) -> Option<Place>;

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

/// A gradient whose state is reached through methods that tell captures what is done with it: a replay leaves the gradients
/// that the function changes as the function did, in the same storage, and a graph is stale once a gradient that it reads is
/// elsewhere.
pub(crate) struct GradientSlot<T>(Arc<Mutex<T>>);

impl<T: Settle> GradientSlot<T> {
    pub(crate) fn new(state: T) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    /// To queue work that depends on whether there is a gradient, and where.
    pub(crate) fn read(&self) -> impl Deref<Target = T> {
        let state = lock(&self.0);
        note_read(|| self.0.clone(), || state.place());
        state
    }

    /// To change the gradient: the result does not depend on where it was.
    pub(crate) fn change(&self) -> MutexGuard<'_, T> {
        note_gradient(|| self.0.clone());
        lock(&self.0)
    }

    /// For what no queued work depends on.
    pub(crate) fn peek(&self) -> impl Deref<Target = T> {
        lock(&self.0)
    }
}
