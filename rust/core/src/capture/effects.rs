//! Records what a captured function reads and changes on the host while the function runs.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::{Error, Result};

/// Identifies the storage of a gradient.
pub(crate) type Place = usize;

/// The operations that captures need from a gradient: those of [`Settle`](super::Settle), through a shared reference.
pub(super) trait Slot: Send + Sync {
    /// Moves the gradient to a fixed buffer, where it accumulates from now on. Returns false if it is in one already.
    fn settle(&self) -> Result<bool>;
    /// The storage of the gradient, if there is one.
    fn place(&self) -> Option<Place>;
    /// Whether the fixed buffer holds a gradient.
    fn is_filled(&self) -> bool;
    /// Marks the fixed buffer as holding a gradient, or as empty.
    fn set_filled(&self, filled: bool);
}

/// A change of a state that every replay repeats.
pub(super) trait Repeat: Send + Sync {
    /// Identifies the state.
    fn key(&self) -> usize;
    /// Whether the change is still in effect when the function ends. An update of a value derived from a variable is
    /// no longer in effect if the variable has changed after the update.
    fn still_holds(&self) -> bool {
        true
    }
    /// Makes the change again.
    fn repeat(&self);
}

/// How this thread runs a captured function now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No captured function runs.
    Off,
    /// The function runs eagerly, before its capture.
    Eager,
    Capturing,
}

type Before = Box<dyn Fn() -> Result<()> + Send + Sync>;
type After = Box<dyn Fn() + Send + Sync>;
type Undo = Box<dyn FnOnce() + Send>;

/// A value that the recorded work depends on, and a check whether the value is unchanged.
struct Dependency {
    /// The value's name in messages.
    name: &'static str,
    is_unchanged: Box<dyn Fn() -> bool + Send>,
}

/// The effects that a run of a function has on the host, and the host state that the function's work depends on.
#[derive(Default)]
pub(crate) struct Effects {
    /// The gradients that the run has changed.
    gradients: Vec<Arc<dyn Slot>>,
    /// For each of `gradients`, whether it has a value after the run.
    filled: Vec<bool>,
    /// Gradients that the run read without changing them first, each with its storage at that time (None if there was
    /// no gradient).
    observed: Vec<(Arc<dyn Slot>, Option<Place>)>,
    /// Changes of variables: one for each changed variable, however often it changed.
    versions: Vec<Box<dyn Repeat>>,
    /// Updates of values derived from variables, one for each derived value. A replay repeats them after `versions`.
    followers: Vec<Box<dyn Repeat>>,
    /// The functions given to `before_replay`.
    before: Vec<Before>,
    /// The functions given to `after_replay`.
    after: Vec<After>,
    /// The values that the recorded work depends on.
    dependencies: Vec<Dependency>,
    /// For each changed `HostState`, its key and the function that restores the state if the recording fails.
    undo: Vec<(usize, Undo)>,
    /// The keys of the states that the function has changed with `HostState::advance`. Replays repeat these changes,
    /// because `advance` also adds a function to `after`.
    advanced: Vec<usize>,
    /// Whether the run has set the position of the random generator; replays would not repeat this change.
    pub(crate) has_seeded: bool,
}

thread_local! {
    static PHASE: Cell<Phase> = const { Cell::new(Phase::Off) };
    static EFFECTS: RefCell<Effects> = RefCell::default();
}

/// Whether a function is being captured on this thread. Work is then recorded, not run, so no values can be read back.
pub fn is_capturing() -> bool {
    PHASE.get() == Phase::Capturing
}

/// Whether a function is being captured on this thread, or runs eagerly before its capture.
pub fn is_running() -> bool {
    PHASE.get() != Phase::Off
}

/// Registers `work`, which runs outside of the graph and updates values that the graph reads. If a function is being
/// captured on this thread, `work` runs before every later replay. If the function runs eagerly before its capture,
/// `work` runs only once: before the next call of the function, if that call captures it. The call that runs `work`
/// returns the errors of `work`. Does nothing outside of captured functions.
pub fn before_replay(work: impl Fn() -> Result<()> + Send + Sync + 'static) {
    if PHASE.get() != Phase::Off {
        EFFECTS.with_borrow_mut(|effects| effects.before.push(Box::new(work)));
    }
}

/// Calls `effect` after every replay of the graph that is being captured on this thread. Does nothing outside of a
/// capture.
pub(super) fn after_replay(effect: impl Fn() + Send + Sync + 'static) {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| effects.after.push(Box::new(effect)));
    }
}

/// Rejects a change of a state if a function is being captured, because replays would not repeat the change. `what` is
/// the state's name in the message.
///
/// # Errors
/// [`Error::Device`] if a function is being captured on this thread.
pub(super) fn refuse_change(what: &'static str) -> Result<()> {
    if !is_capturing() {
        return Ok(());
    }
    Err(Error::device(
        "capture",
        format!("the function changes {what}, but replays would not; change it between calls"),
    ))
}

/// Records a change of the state with the key `key`. `undo` restores the value that the state had before the change;
/// only the `undo` of the first change of a state is kept.
pub(super) fn note_change(key: usize, undo: impl FnOnce() + Send + 'static) {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| {
            if !effects.undo.iter().any(|&(known, _)| known == key) {
                effects.undo.push((key, Box::new(undo)));
            }
        });
    }
}

/// Whether the function that is being captured on this thread has changed the state `key`, by `HostState::change` or
/// `HostState::advance`.
pub(super) fn has_changed(key: usize) -> bool {
    is_capturing() && EFFECTS.with_borrow(|effects| effects.undo.iter().any(|&(known, _)| known == key))
}

/// Records that the function advances the state `key`. The change itself is repeated by a function that
/// `HostState::advance` gives to [`after_replay`].
pub(super) fn note_advance(key: usize) {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| effects.advanced.push(key));
    }
}

/// Whether the function that is being captured on this thread has changed the state `key` by `HostState::change`, but
/// not by `HostState::advance`. The value after the change is then assumed to be the same in every call, so work that
/// reads this value does not depend on the value before the call.
pub(super) fn has_changed_but_not_advanced(key: usize) -> bool {
    has_changed(key) && !EFFECTS.with_borrow(|effects| effects.advanced.contains(&key))
}

/// Records that queued work depends on the value that messages call `name`. `is_unchanged` checks before each later
/// call whether the value is still the same.
pub(super) fn note_dependency(name: &'static str, is_unchanged: impl Fn() -> bool + Send + 'static) {
    if is_capturing() {
        let dependency = Dependency { name, is_unchanged: Box::new(is_unchanged) };
        EFFECTS.with_borrow_mut(|effects| effects.dependencies.push(dependency));
    }
}

/// Rejects the operation `op`, which a graph cannot contain, while a function is captured.
///
/// # Errors
/// [`Error::Device`] if a function is being captured on this thread.
pub fn refuse(op: &'static str) -> Result<()> {
    if !is_capturing() {
        return Ok(());
    }
    Err(Error::device(
        op,
        "values are not known inside a captured function, so nothing can read them or wait for them there; return the tensor and \
         read it after the call",
    ))
}

/// A run of a function on this thread. The run's effects are recorded until the `Run` is finished or dropped.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "graphs exist on CUDA alone"))]
pub(crate) struct Run(());

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "graphs exist on CUDA alone"))]
impl Run {
    /// Starts to record the effects of a capture if `capturing`, otherwise those of an eager run.
    ///
    /// # Errors
    /// [`Error::Device`] if another run is under way on this thread.
    pub(crate) fn begin(capturing: bool) -> Result<Self> {
        if PHASE.get() != Phase::Off {
            return Err(Error::device(
                "capture",
                "another captured function is running on this thread; start the capture after it has returned",
            ));
        }
        EFFECTS.take();
        PHASE.set(if capturing { Phase::Capturing } else { Phase::Eager });
        Ok(Self(()))
    }

    /// Ends the run and returns its effects.
    pub(crate) fn finish(self) -> Effects {
        let mut effects = EFFECTS.take();
        effects.filled = effects.gradients.iter().map(|gradient| gradient.is_filled()).collect();
        // If the function has changed a variable after deriving a value from it, the derived value is out of date, and
        // stays so after replays.
        effects.followers.retain(|follower| follower.still_holds());
        effects
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        PHASE.set(Phase::Off);
        drop(EFFECTS.take());
    }
}

/// Records that a gradient is about to change.
pub(super) fn note_gradient(gradient: impl FnOnce() -> Arc<dyn Slot>) {
    if PHASE.get() == Phase::Off {
        return;
    }
    let gradient = gradient();
    EFFECTS.with_borrow_mut(|effects| {
        if !effects.gradients.iter().any(|known| is_same(known, &gradient)) {
            effects.gradients.push(gradient);
        }
    });
}

/// Records that work depends on whether there is a gradient, and on where its storage is. If the run has changed the
/// gradient before, nothing is recorded: a replay changes the gradient in the same way.
pub(super) fn note_read(gradient: impl FnOnce() -> Arc<dyn Slot>, place: impl FnOnce() -> Option<Place>) {
    if !is_capturing() {
        return;
    }
    let gradient = gradient();
    EFFECTS.with_borrow_mut(|effects| {
        let mut known = effects.gradients.iter().chain(effects.observed.iter().map(|(known, _)| known));
        if !known.any(|known| is_same(known, &gradient)) {
            effects.observed.push((gradient, place()));
        }
    });
}

fn is_same(one: &Arc<dyn Slot>, other: &Arc<dyn Slot>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// Records that the random generator is set to another position.
pub(super) fn note_seed() {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| effects.has_seeded = true);
    }
}

/// Records that a variable was changed in place.
pub(super) fn note_version(version: impl FnOnce() -> Box<dyn Repeat>) {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| push_new(&mut effects.versions, version()));
    }
}

/// Records that a value was derived from a variable's value.
pub(super) fn note_follower(follower: impl FnOnce() -> Box<dyn Repeat>) {
    if is_capturing() {
        EFFECTS.with_borrow_mut(|effects| push_new(&mut effects.followers, follower()));
    }
}

/// Adds `new` to `changes`, unless they have a change of the same state already.
fn push_new(changes: &mut Vec<Box<dyn Repeat>>, new: Box<dyn Repeat>) {
    if !changes.iter().any(|known| known.key() == new.key()) {
        changes.push(new);
    }
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "graphs exist on CUDA alone"))]
impl Effects {
    /// Gives fixed storage to every gradient that the run has changed, so that the address of the gradient is the same
    /// in the capture and in each replay. Returns whether a gradient has moved.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for the storage.
    pub(crate) fn settle_gradients(&mut self) -> Result<bool> {
        let mut has_moved = false;
        for gradient in &self.gradients {
            has_moved |= gradient.settle()?;
        }
        self.filled = self.gradients.iter().map(|gradient| gradient.is_filled()).collect();
        Ok(has_moved)
    }

    /// The number of gradients that the run has changed.
    #[cfg(test)]
    pub(crate) fn changed_gradients(&self) -> usize {
        self.gradients.len()
    }

    /// Marks each gradient as filled or empty, as it was at the end of the run or at a later `settle_gradients`. Call
    /// this after a replay, which changes gradients but not these marks, and after a failed capture, which has changed
    /// the marks but not the gradients.
    pub(crate) fn restore_gradients(&self) {
        for (gradient, &filled) in self.gradients.iter().zip(&self.filled) {
            gradient.set_filled(filled);
        }
    }

    /// Whether a replay would no longer do the same as a call.
    pub(crate) fn is_stale(&self) -> bool {
        self.changed_dependency().is_some() || self.observed.iter().any(|(gradient, place)| gradient.place() != *place)
    }

    /// The name of a state that the recorded work depends on and that has changed, if there is one.
    pub(crate) fn changed_dependency(&self) -> Option<&'static str> {
        let changed = self.dependencies.iter().find(|dependency| !(dependency.is_unchanged)());
        changed.map(|dependency| dependency.name)
    }

    /// Keeps the changes of a recording that has succeeded: dropping the effects no longer undoes them.
    pub(crate) fn commit(&mut self) {
        self.undo.clear();
    }

    /// Runs the functions given to `before_replay`.
    pub(crate) fn run_before_replay(&self) -> Result<()> {
        self.before.iter().try_for_each(|work| work())
    }

    /// Repeats the effects on the host, and calls the functions given to `after_replay`.
    pub(crate) fn run_after_replay(&self) {
        self.restore_gradients();
        self.versions.iter().chain(&self.followers).for_each(|change| change.repeat());
        self.after.iter().for_each(|effect| effect());
    }
}

impl Drop for Effects {
    /// Undoes the changes of a recording that was not committed.
    fn drop(&mut self) {
        self.undo.drain(..).for_each(|(_, undo)| undo());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Tensor, Var};

    /// The gradient, or NaN if there is none.
    fn gradient(var: &Var) -> f64 {
        var.grad().map_or(f64::NAN, |grad| grad.item().unwrap())
    }

    #[test]
    fn a_replay_repeats_the_effects_on_the_host() {
        let x = Var::new(2f32, &Device::Cpu).unwrap();
        let step = || {
            x.zero_grad()?;
            (x.as_tensor() * x.as_tensor())?.backward()?;
            x.set(&Tensor::new(3f32, &Device::Cpu)?)
        };
        // An eager run.
        let run = Run::begin(/* capturing */ false).unwrap();
        step().unwrap();
        let mut eager = run.finish();
        assert_eq!(eager.gradients.len(), 1);
        assert!(eager.settle_gradients().unwrap(), "the gradient moves");
        assert!(!eager.settle_gradients().unwrap(), "the gradient has moved already");
        assert_eq!(gradient(&x), 4.0);
        let storage = x.grad_storage().unwrap();

        // A capture. On the CPU, a captured function runs as usual.
        let run = Run::begin(/* capturing */ true).unwrap();
        step().unwrap();
        let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        after_replay({
            let count = count.clone();
            move || {
                count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        });
        before_replay(|| Err(Error::argument("test", "refused")));
        let effects = run.finish();
        let same = crate::raw::storage_identity(&x.grad_storage().unwrap()) == crate::raw::storage_identity(&storage);
        assert!(same, "the gradient keeps its storage");

        let version = x.version();
        x.zero_grad().unwrap();
        assert!(x.grad().is_none());
        assert!(effects.run_before_replay().is_err());
        effects.run_after_replay();
        assert_eq!((x.version(), count.load(std::sync::atomic::Ordering::Relaxed)), (version + 1, 1));
        // `run_after_replay` has marked the gradient as filled, as it was after the run. No graph was launched, so the
        // gradient's buffer still has the zeros that zero_grad() wrote.
        assert_eq!(gradient(&x), 0.0);
    }

    #[test]
    fn a_run_begins_only_after_the_previous_one_has_ended() {
        for capturing in [false, true] {
            let run = Run::begin(capturing).unwrap();
            assert!(is_running());
            assert_eq!(is_capturing(), capturing);
            assert!(Run::begin(capturing).is_err());
            drop(run);
            assert!(!is_running());
        }
    }

    #[test]
    fn a_capture_notes_that_the_random_generator_is_set() {
        let run = Run::begin(/* capturing */ true).unwrap();
        assert!(!EFFECTS.with_borrow(|effects| effects.has_seeded));
        crate::rng::set_state(crate::rng::state());
        assert!(run.finish().has_seeded);
    }

    #[test]
    fn reading_is_rejected_only_while_capturing() {
        let run = Run::begin(/* capturing */ true).unwrap();
        let message = refuse("item").unwrap_err().to_string();
        assert!(message.starts_with("item: values are not known inside a captured function"), "{message}");
        drop(run);
        assert!(refuse("item").is_ok());
    }

    #[test]
    fn before_replay_and_after_replay_do_nothing_outside_of_captures() {
        before_replay(|| Ok(()));
        after_replay(|| ());
        let effects = EFFECTS.take();
        assert!(effects.before.is_empty() && effects.after.is_empty());
    }
}
