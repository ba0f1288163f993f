//! [`Generator`]: the position of a random generator.

use super::effects::note_seed;

/// The position of a random generator. A draw advances the position, and each replay advances it by the draws of the
/// recorded call. Setting the position is recorded (`Effects::has_seeded`), because replays do not set the position.
pub(crate) struct Generator<S>(S);

impl<S: Copy> Generator<S> {
    /// A generator that starts at `state`. Unlike [`at`](Self::at), this does not record that a position was set.
    pub(crate) const fn initial(state: S) -> Self {
        Self(state)
    }

    /// A generator that starts at `state`.
    pub(crate) fn at(state: S) -> Self {
        note_seed();
        Self(state)
    }

    pub(crate) const fn get(&self) -> S {
        self.0
    }

    /// Continue from `state`.
    pub(crate) fn set(&mut self, state: S) {
        *self = Self::at(state);
    }

    /// Draw with `draw`, which advances the position.
    pub(crate) fn draw<R>(&mut self, draw: impl FnOnce(&mut S) -> R) -> R {
        draw(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Run;
    use super::*;

    #[test]
    fn a_run_notes_when_the_generator_is_seeded_but_not_draws() {
        let mut generator = Generator::initial(1);
        let run = Run::begin(true).unwrap();
        generator.draw(|state| *state += 1);
        assert!(!run.finish().has_seeded);
        let run = Run::begin(true).unwrap();
        generator.set(5);
        assert!(run.finish().has_seeded);
        assert_eq!(generator.get(), 5);
    }
}
