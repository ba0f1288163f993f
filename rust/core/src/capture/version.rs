//! [`Version`], which counts the changes of a variable, and [`Follower`], which tells whether a value derived from a
//! variable is up to date.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::effects::{Repeat, note_follower, note_version};

/// Counts the in-place changes of a variable's storage, so that a backward pass can detect that a saved value was
/// overwritten. Each replay of a graph that changes the variable counts as one change, too.
#[derive(Debug, Default)]
pub(crate) struct Version(AtomicU64);

impl Version {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Counts a change of the value, and again after each replay of the function that is being captured, if any.
    pub(crate) fn bump(self: &Arc<Self>) {
        // Counts the change now; `note_version` has replays call `repeat` again.
        self.repeat();
        note_version(|| Box::new(self.clone()));
    }
}

impl Repeat for Arc<Version> {
    // Changes with the same key are repeated once in a replay.
    fn key(&self) -> usize {
        Self::as_ptr(self) as usize
    }

    fn repeat(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// The version of a variable from which a value was derived, such as a copy in another dtype or an optimizer's f32
/// values. If a captured function updates the derived value, every replay updates the value and this version, too.
/// [`Var::is_followed_by`](crate::Var::is_followed_by) compares this version with the variable's;
/// [`Var::set_followed_by`](crate::Var::set_followed_by) sets this version to the variable's. Clones share the version.
#[derive(Clone, Debug, Default)]
pub struct Follower(Arc<AtomicU64>);

impl Follower {
    /// The version from which the value was derived.
    pub fn version(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether the derived value is up to date with `version`.
    pub(crate) fn is_at(&self, version: &Version) -> bool {
        self.version() == version.get()
    }

    /// Marks the derived value as up to date with `version`, and again after each replay of the function that is being
    /// captured, if any.
    pub(crate) fn follow(&self, version: &Arc<Version>) {
        let following = Following(self.clone(), version.clone());
        following.repeat();
        note_follower(|| Box::new(following));
    }
}

/// The update of a follower's derived value from the variable with this version.
struct Following(Follower, Arc<Version>);

impl Repeat for Following {
    fn key(&self) -> usize {
        Arc::as_ptr(&self.0.0) as usize
    }

    fn still_holds(&self) -> bool {
        // False if the variable has changed after this update. Replays then do not repeat the update.
        self.0.is_at(&self.1)
    }

    fn repeat(&self) {
        self.0.0.store(self.1.get(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    #[test]
    fn replays_advance_versions_and_the_followers_that_are_up_to_date() {
        let (version, [current, outdated]) = (Arc::new(Version::default()), [Follower::default(), Follower::default()]);
        let capturing = true;
        let run = Run::begin(capturing).unwrap();
        outdated.follow(&version);
        version.bump();
        version.bump();
        current.follow(&version);
        let effects = run.finish();
        assert_eq!((version.get(), current.version(), outdated.version()), (2, 2, 0));
        // `run_after_replay` does what follows a replay. The two changes of the variable together count as one. The
        // update of `outdated` is not repeated, because the variable changed after it.
        effects.run_after_replay();
        assert_eq!((version.get(), current.version(), outdated.version()), (3, 3, 0));
    }

    #[test]
    fn outside_of_a_recording_nothing_is_noted() {
        let (version, follower) = (Arc::new(Version::default()), Follower::default());
        version.bump();
        follower.follow(&version);
        let capturing = false;
        let run = Run::begin(capturing).unwrap();
        version.bump();
        follower.follow(&version);
        let effects = run.finish();
        effects.run_after_replay();
        assert_eq!((version.get(), follower.version()), (2, 2));
    }
}
