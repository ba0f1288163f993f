//! Gradients that a backward pass has not yet completed.

use std::ops::Range;

use smallvec::SmallVec;

use crate::cpu::Add;
use crate::raw::Raw;
use crate::{Result, compute};

/// The gradient of one result before all its consumers have contributed.
pub struct Pending {
    /// The sum so far.
    pub sum: Raw,
    /// Whether nothing else uses the storage of `sum`, so that a gradient can be added to it in place.
    pub owned: bool,
    /// The parts of `sum` that have not been written yet, because consumers of slices of the result write only their
    /// part of its gradient.
    unset: Unset,
}

/// Ranges of indices along dimension `dim` whose elements have not been written. No ranges: all elements are written.
#[derive(Default)]
struct Unset {
    dim: usize,
    ranges: SmallVec<[Range<usize>; 2]>,
}

impl Unset {
    /// Remove `part` along `dim` from the unset ranges, if all of it is unset. Returns whether it was.
    fn take(&mut self, dim: usize, part: &Range<usize>) -> bool {
        let holds = |range: &Range<usize>| range.start <= part.start && part.end <= range.end;
        let Some(index) = self.ranges.iter().position(holds).filter(|_| self.dim == dim) else { return false };
        let range = self.ranges.remove(index);
        let rest = [range.start..part.start, part.end..range.end];
        self.ranges.extend(rest.into_iter().filter(|range| !range.is_empty()));
        true
    }
}

impl Pending {
    /// A gradient whose elements are all written.
    pub fn new(sum: Raw, owned: bool) -> Self {
        Self { sum, owned, unset: Unset::default() }
    }

    /// A gradient in uninitialised storage that nothing else uses, to be written in parts along `dim`.
    pub(super) fn unset(sum: Raw, dim: usize) -> Self {
        let ranges = std::iter::once(0..sum.dims()[dim]).collect();
        Self { sum, owned: true, unset: Unset { dim, ranges } }
    }

    /// Whether all elements of `sum` are written.
    #[cfg(feature = "cuda")]
    pub(super) fn is_complete(&self) -> bool {
        self.unset.ranges.is_empty()
    }

    /// A view of the indices `part` along `dim` of `sum`, which then count as written: the caller must write all
    /// elements of the view. `None` if some of them have been written already, or if `sum` is written in parts along
    /// another dimension.
    pub(super) fn take(&mut self, dim: usize, part: &Range<usize>) -> Result<Option<Raw>> {
        let is_free = self.unset.take(dim, part);
        Ok(is_free.then(|| self.sum.narrow(dim, part.start, part.len())).transpose()?)
    }

    /// Set the elements of `sum` that have not been written to zero.
    pub(super) fn complete(&mut self) -> Result<()> {
        let Unset { dim, ranges } = std::mem::take(&mut self.unset);
        ranges.into_iter().try_for_each(|range| compute::fill(&self.sum.narrow(dim, range.start, range.len())?, 0.0))
    }

    /// Add `grad`, which has the shape of `sum`, to `sum`.
    pub(super) fn add(&mut self, grad: &Raw) -> Result<()> {
        self.complete()?;
        if self.owned {
            return compute::accumulate(&self.sum, grad);
        }
        // Something else uses the storage of `sum`, so the new sum gets storage of its own.
        self.sum = compute::binary(&self.sum, grad, Add)?;
        self.owned = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Unset;

    #[test]
    fn parts_are_taken_once() {
        let mut unset = Unset { dim: 1, ranges: std::iter::once(0..10).collect() };
        assert!(unset.take(1, &(3..5)));
        assert!(!unset.take(1, &(4..6)), "indices 4..5 are written already");
        assert!(!unset.take(0, &(6..8)), "the unset ranges are along dimension 1");
        assert!(unset.take(1, &(0..3)) && unset.take(1, &(5..10)));
        assert!(unset.ranges.is_empty());
    }
}
