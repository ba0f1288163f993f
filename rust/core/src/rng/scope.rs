//! The generator that a thread draws from.
//!
//! All threads share one generator. Two kinds of work do not advance it. While a [`Stream`] exists, its thread draws
//! from the stream's generator. The recomputation of a checkpoint draws from the positions from which the checkpoint's
//! forward pass drew.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

use super::state::State;
use crate::capture::Generator;

/// The shared generator. Its seed, until [`manual_seed`] sets another, is arbitrary: the letters "random" in ASCII.
static GENERATOR: Mutex<Generator<State>> = Mutex::new(Generator::initial(State { seed: 0x7261_6e64_6f6d, offset: 0 }));

/// One draw: the state of the generator before the draw, and the number of blocks of random bits that the draw took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    start: State,
    blocks: u64,
}

/// A source of a thread's draws, or a record of them. Scopes are nested; in `SCOPES`, the innermost scope is the last.
enum Scope {
    /// Draws come from this generator.
    Stream(Generator<State>),
    /// Each draw is recorded here; draws come from the next outer scope with a generator.
    Recording(Vec<Draw>),
    /// Draws repeat recorded draws.
    Repeating(Repeated),
}

/// Recorded draws that are being repeated.
struct Repeated {
    /// The draws that were not repeated yet.
    draws: std::vec::IntoIter<Draw>,
    /// The generator after the latest draw; before the first draw, at the start of that draw.
    position: Generator<State>,
    /// Whether a draw took another number of blocks than the recorded draw, or came after the last recorded draw.
    has_differed: bool,
}

impl Repeated {
    /// Repeats the next draw. If it differs from the recorded draw, or if none is left, draws from the current
    /// position. Returns the state before the draw.
    fn take(&mut self, blocks: u64) -> State {
        match self.draws.next() {
            Some(draw) if draw.blocks == blocks => self.position = Generator::initial(draw.start),
            _ => self.has_differed = true,
        }
        self.position.draw(|state| state.take(blocks))
    }
}

thread_local! {
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// The index of the innermost scope with a generator, from which this thread draws; `None` for the shared generator.
fn source(scopes: &[Scope]) -> Option<usize> {
    scopes.iter().rposition(|scope| !matches!(scope, Scope::Recording(_)))
}

/// Calls `visit` with the generator of `scope`, or with the shared generator if `scope` has none.
fn with_generator<T>(scope: Option<&mut Scope>, visit: impl FnOnce(&mut Generator<State>) -> T) -> T {
    match scope {
        Some(Scope::Stream(generator)) => visit(generator),
        Some(Scope::Repeating(repeated)) => visit(&mut repeated.position),
        Some(Scope::Recording(_)) | None => visit(&mut GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// Sets the generator that this thread draws from to the beginning of the stream of `seed`.
pub fn manual_seed(seed: u64) {
    set_state(State { seed, offset: 0 });
}

/// The state of the generator that this thread draws from.
pub fn state() -> State {
    SCOPES.with_borrow_mut(|scopes| {
        let source = source(scopes);
        with_generator(source.map(|at| &mut scopes[at]), |generator| generator.get())
    })
}

/// Sets the state of the generator that this thread draws from.
pub fn set_state(state: State) {
    SCOPES.with_borrow_mut(|scopes| {
        let source = source(scopes);
        with_generator(source.map(|at| &mut scopes[at]), |generator| generator.set(state));
    });
}

/// Advances the generator that this thread draws from by `blocks` blocks of random bits, and records the draw in the
/// [`Recording`] scopes inside that generator's scope. Returns the state before the draw.
pub(crate) fn advance(blocks: u64) -> State {
    SCOPES.with_borrow_mut(|scopes| {
        let source = source(scopes);
        let start = match source.map(|at| &mut scopes[at]) {
            Some(Scope::Repeating(repeated)) => repeated.take(blocks),
            scope => with_generator(scope, |generator| generator.draw(|state| state.take(blocks))),
        };
        for scope in &mut scopes[source.map_or(0, |at| at + 1)..] {
            if let Scope::Recording(draws) = scope {
                draws.push(Draw { start, blocks });
            }
        }
        start
    })
}

/// A scope of this thread, which ends when this guard is dropped.
struct Guard {
    /// The index of the scope in `SCOPES`.
    depth: usize,
    /// Makes the guard `!Send`: its scope belongs to the thread that entered it.
    _thread: PhantomData<*const ()>,
}

impl Guard {
    fn enter(scope: Scope) -> Self {
        let depth = SCOPES.with_borrow_mut(|scopes| {
            scopes.push(scope);
            scopes.len() - 1
        });
        Self { depth, _thread: PhantomData }
    }

    /// End the scope and all scopes inside it. Returns the scope; `None` if an outer guard has ended it already.
    fn leave(self) -> Option<Scope> {
        SCOPES.with_borrow_mut(|scopes| {
            scopes.truncate(self.depth + 1);
            if scopes.len() > self.depth { scopes.pop() } else { None }
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        SCOPES.with_borrow_mut(|scopes| scopes.truncate(self.depth));
    }
}

/// While this object exists, this thread draws from the object's own generator, and advances no other generator.
#[must_use = "the thread draws from the stream only until this object is dropped"]
pub struct Stream(#[allow(dead_code, reason = "dropping it ends the scope")] Guard);

impl Stream {
    /// A generator that begins at `start`; see [`State::of`].
    pub fn enter(start: State) -> Self {
        // Unlike `initial`, `seeded` notes that a state was set. A CUDA graph that is being recorded must know this,
        // because its replays do not set the state.
        Self(Guard::enter(Scope::Stream(Generator::seeded(start))))
    }
}

/// Records the draws of this thread until this object is finished or dropped.
pub(crate) struct Recording(Guard);

impl Recording {
    pub(crate) fn begin() -> Self {
        Self(Guard::enter(Scope::Recording(Vec::new())))
    }

    pub(crate) fn finish(self) -> Vec<Draw> {
        match self.0.leave() {
            Some(Scope::Recording(draws)) => draws,
            _ => Vec::new(),
        }
    }
}

/// Repeats recorded draws in this thread until this object is finished or dropped.
pub(crate) struct Repeating(Guard);

impl Repeating {
    pub(crate) fn begin(draws: Vec<Draw>) -> Self {
        let position = draws.first().map_or_else(state, |draw| draw.start);
        Self(Guard::enter(Scope::Repeating(Repeated {
            draws: draws.into_iter(),
            position: Generator::initial(position),
            has_differed: false,
        })))
    }

    /// Whether a draw took another number of blocks than the recorded draw, or came after the last recorded draw. Fewer
    /// draws than were recorded are not a difference.
    pub(crate) fn finish(self) -> bool {
        match self.0.leave() {
            Some(Scope::Repeating(repeated)) => repeated.has_differed,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::uniform_vec;

    const START: State = State { seed: 3, offset: 11 };

    #[test]
    fn a_stream_begins_at_its_state_and_advances_no_other_generator() {
        let expected = {
            let _outer = Stream::enter(START);
            let inner = Stream::enter(State { seed: 8, offset: 0 });
            manual_seed(5);
            // Nine numbers are three blocks of four.
            uniform_vec(9);
            assert_eq!(state(), State { seed: 5, offset: 3 });
            drop(inner);
            assert_eq!(state(), START);
            uniform_vec(6)
        };
        let _again = Stream::enter(START);
        assert_ne!(std::thread::spawn(state).join().unwrap(), START);
        assert_eq!(uniform_vec(6), expected);
        assert_eq!(state(), State { offset: START.offset + 2, ..START });
    }

    #[test]
    fn recorded_draws_are_repeated_and_differences_are_reported() {
        let _stream = Stream::enter(START);
        let recording = Recording::begin();
        let first = uniform_vec(5);
        set_state(State { seed: 4, offset: 2 });
        let second = uniform_vec(3);
        let draws = recording.finish();
        let after = state();

        let repeating = Repeating::begin(draws.clone());
        // A checkpoint inside of a recomputed function records the draws that the recomputation repeats.
        let recording = Recording::begin();
        assert_eq!(state(), START);
        assert_eq!(uniform_vec(5), first);
        assert_eq!(uniform_vec(3), second);
        assert_eq!(recording.finish().len(), 2);
        assert!(!repeating.finish());
        assert_eq!(state(), after);

        // The second recorded draw is not repeated, which is allowed.
        let shorter = Repeating::begin(draws.clone());
        uniform_vec(5);
        assert!(!shorter.finish());
        // The first recorded draw took fewer blocks.
        let other = Repeating::begin(draws);
        uniform_vec(50);
        assert!(other.finish());
        // No draw was recorded.
        let more = Repeating::begin(Vec::new());
        uniform_vec(1);
        assert!(more.finish());
        assert_eq!(state(), after);
    }
}
