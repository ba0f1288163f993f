//! [`State`]: where a generator is.

/// Seed and position of a generator; restoring it repeats the draws that followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The seed.
    pub seed: u64,
    /// Blocks of four 32-bit numbers drawn so far.
    pub offset: u64,
}

impl State {
    /// Moves on by `blocks` blocks; returns where they start.
    pub(super) const fn take(&mut self, blocks: u64) -> Self {
        let start = *self;
        self.offset = self.offset.wrapping_add(blocks);
        start
    }
}
