//! [`Generator`]: the state of a random generator.

use super::effects::note_seed;

/// The state of a random generator: its seed and its position. A draw advances the position, and each replay advances
/// it by the draws of the recorded call. Setting the state is recorded (`Effects::has_seeded`), because replays would
/// not set it again: capturing a function that sets the state is an error.
pub(crate) struct Generator<S>(S);

impl<S: Copy> Generator<S> {
    /// Creates a generator that starts at `state`. Unlike [`seeded`](Self::seeded), this does not record that a state
    /// was set.
    pub(crate) const fn initial(state: S) -> Self {
        Self(state)
    }

    /// Creates a generator that starts at `state`, and records that a state was set.
    pub(crate) fn seeded(state: S) -> Self {
        note_seed();
        Self(state)
    }

    pub(crate) const fn get(&self) -> S {
        self.0
    }

    /// Continues from `state`, and records that a state was set.
    pub(crate) fn set(&mut self, state: S) {
        *self = Self::seeded(state);
    }

    /// Draws with `advance`, which advances the position; returns its result.
    pub(crate) fn draw<R>(&mut self, advance: impl FnOnce(&mut S) -> R) -> R {
        advance(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    #[test]
    fn a_capture_notes_that_the_state_is_set_but_not_draws() {
        let mut generator = Generator::initial(1);
        let run = Run::begin(/* capturing */ true).unwrap();
        generator.draw(|state| *state += 1);
        assert!(!run.finish().has_seeded);
        let run = Run::begin(/* capturing */ true).unwrap();
        generator.set(5);
        assert!(run.finish().has_seeded);
        assert_eq!(generator.get(), 5);
    }
}
