//! [`State`]: the seed and the position of a generator.

/// The seed and the position of a generator. A generator that is set back to a state repeats the draws that followed
/// the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The seed.
    pub seed: u64,
    /// The position: the number of the next block of four 32-bit numbers, which is the number of blocks that the
    /// generator has drawn if it began at 0.
    pub offset: u64,
}

impl State {
    /// Advances by `blocks` blocks; returns the state before them.
    pub(super) const fn take(&mut self, blocks: u64) -> Self {
        let start = *self;
        self.offset = self.offset.wrapping_add(blocks);
        start
    }
}
