//! [`HostState`]: state of the host that queued work depends on.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::effects::{
    after_replay, has_changed, has_changed_but_not_advanced, note_advance, note_change, note_dependency, refuse_change,
};
use crate::Result;

/// Host state that queued work depends on, or that each call of a function changes. A replay of a CUDA graph repeats
/// the device's work only; this type handles the host's part, so the owners of such state need no code for graphs:
///
/// - A value that [`read`](Self::read) returns while a function is recorded becomes part of the record. If the value is
///   different at a later call, that call runs eagerly and the next one records again. A function that reads a value
///   and then advances it cannot be recorded.
/// - [`set`](Self::set) returns an error while a function is recorded.
/// - A change by [`advance`](Self::advance) is repeated by every replay, and undone if the recording fails.
/// - A change by [`change`](Self::change) is not repeated; the function itself must undo it.
///
/// Clones share the state.
pub struct HostState<T>(Arc<Inner<T>>);

struct Inner<T> {
    /// The state's name in messages, such as "the learning rate".
    name: &'static str,
    value: Mutex<T>,
}

impl<T: fmt::Debug> fmt::Debug for HostState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().fmt(f)
    }
}

impl<T> Clone for HostState<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> HostState<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone + Send + 'static> HostState<T> {
    /// Creates host state with this value; messages call the state `name`.
    pub fn new(name: &'static str, value: T) -> Self {
        Self(Arc::new(Inner { name, value: Mutex::new(value) }))
    }

    /// The value, for use on the host only: queued work must not depend on it.
    pub fn get(&self) -> T {
        self.lock().clone()
    }

    /// Replaces the value.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) while a function is recorded, because replays would not repeat the
    /// change.
    pub fn set(&self, value: T) -> Result<()> {
        refuse_change(self.0.name)?;
        *self.lock() = value;
        Ok(())
    }

    /// Changes the value; if a function is being recorded, each replay changes it too. Queued work that needs the value
    /// must read a copy in device memory, which a kernel or a function given to [`before_replay`](super::before_replay)
    /// keeps up to date.
    pub fn advance(&self, change: impl Fn(&mut T) + Send + Sync + 'static) {
        self.change(&change);
        // Unlike after a `change` alone, replays repeat the change, so the function need not restore the value.
        note_advance(self.key());
        let state = self.clone();
        after_replay(move || change(&mut state.lock()));
    }

    /// Checks that the function being recorded, if there is one, has not changed the value so far. Some work depends on
    /// a copy of the value that a function given to [`before_replay`](super::before_replay) writes, and then advances
    /// the value. Such work begins with this check: the copy is written once for each replay, so a recorded function
    /// may do the work only once.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the function has changed the value; in the message, `what` follows
    /// "the function changes".
    pub fn refuse_repetition(&self, what: &'static str) -> Result<()> {
        if has_changed(self.key()) { refuse_change(what) } else { Ok(()) }
    }

    /// Changes the value with `change`, and returns the result of `change`. A captured function must restore the value
    /// before it returns, because replays do not repeat the change; [`advance`](Self::advance) makes changes that
    /// replays repeat.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let (state, old) = (self.clone(), self.get());
        // If the recording fails, this restores the value.
        note_change(self.key(), move || *state.lock() = old);
        change(&mut self.lock())
    }

    fn key(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

impl<T: Clone + PartialEq + Send + 'static> HostState<T> {
    /// The value, for queued work that depends on the value.
    pub fn read(&self) -> T {
        let value = self.get();
        if has_changed_but_not_advanced(self.key()) {
            // The value comes from a `change` in this call. It is assumed to be the same in every call, whatever the
            // value was before the call, so the record does not depend on the value before the call. After `advance`,
            // `has_changed_but_not_advanced` is false, because each call then has another value.
            return value;
        }
        let (known, state) = (value.clone(), self.clone());
        note_dependency(self.0.name, move || *state.lock() == known);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    // `Run::begin(true)` records, as a capture does; `Run::begin(false)` is an eager run. Effects that are dropped undo
    // the run's changes, unless `commit` was called before.

    #[test]
    fn a_record_is_stale_while_a_value_that_it_depends_on_differs() {
        let (rate, count) = (HostState::new("the rate", 1.0), HostState::new("the count", 1));
        let run = Run::begin(true).unwrap();
        assert_eq!((rate.read(), count.get()), (1.0, 1));
        let effects = run.finish();
        assert_eq!(effects.changed_dependency(), None);
        // The record does not depend on the count, because `get` notes nothing.
        count.set(2).unwrap();
        assert_eq!(effects.changed_dependency(), None);
        rate.set(2.0).unwrap();
        assert_eq!(effects.changed_dependency(), Some("the rate"));
        // With the old value the record is valid again.
        rate.set(1.0).unwrap();
        assert_eq!(effects.changed_dependency(), None);
    }

    #[test]
    fn a_record_is_stale_at_once_if_the_function_reads_a_state_and_then_advances_it() {
        let count = HostState::new("the count", 0);
        let run = Run::begin(true).unwrap();
        count.read();
        count.advance(|n| *n += 1);
        assert_eq!(run.finish().changed_dependency(), Some("the count"));
    }

    #[test]
    fn an_eager_run_notes_no_dependency() {
        let count = HostState::new("the count", 0);
        let run = Run::begin(false).unwrap();
        count.read();
        count.advance(|n| *n += 1);
        assert_eq!(run.finish().changed_dependency(), None);
    }

    #[test]
    fn replays_advance_a_state_and_a_failed_recording_restores_it() {
        let count = HostState::new("the count", 5);
        let run = Run::begin(true).unwrap();
        count.advance(|n| *n += 1);
        count.advance(|n| *n *= 2);
        count.change(|n| *n += 100);
        // A run that is dropped instead of finished is a failed recording.
        drop(run);
        assert_eq!(count.get(), 5);

        let run = Run::begin(true).unwrap();
        count.advance(|n| *n += 1);
        count.advance(|n| *n *= 2);
        let mut effects = run.finish();
        effects.commit();
        assert_eq!(count.get(), (5 + 1) * 2);
        // A replay of the recorded call.
        effects.run_after_replay();
        drop(effects);
        assert_eq!(count.get(), (12 + 1) * 2);
    }

    #[test]
    fn a_record_does_not_depend_on_a_value_that_the_function_sets_itself() {
        let is_on = HostState::new("the switch", true);
        let run = Run::begin(true).unwrap();
        is_on.change(|on| *on = false);
        assert!(!is_on.read());
        is_on.change(|on| *on = true);
        let mut effects = run.finish();
        effects.commit();
        assert_eq!(effects.changed_dependency(), None);
        is_on.set(false).unwrap();
        assert_eq!(effects.changed_dependency(), None);
    }

    #[test]
    fn setting_is_rejected_only_while_recording() {
        let rate = HostState::new("the rate", 1.0);
        for recording in [false, true] {
            let run = Run::begin(recording).unwrap();
            let result = rate.set(2.0);
            assert_eq!(result.is_err(), recording);
            if let Err(error) = result {
                let message = error.to_string();
                assert!(message.starts_with("capture: the function changes the rate, but"), "{message}");
            }
            drop(run);
        }
    }
}
