//! [`Recorder`]: what the runs of a function under gradient checkpointing record, and the stack of the recorders of
//! nested checkpoints.
//!
//! In the first run, the operations of the function keep numbered slots instead of the values that their backward
//! passes read (the saved values). A later run recomputes these values, in the same order, and fills the slots.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::TensorId;

use super::{Region, StoredResults};
use crate::capture::Version;
use crate::raw::Raw;
use crate::tape::{set_grad_enabled, set_recording};
use crate::tensor::Tensor;

/// What a run of a checkpointed function has recorded so far.
pub(super) enum Recorder {
    Record(Recording),
    Recompute(Recomputing),
}

/// The state of a function's first run, which counts the values that are saved and keeps expensive results.
pub(super) struct Recording {
    /// The call of the function, which the slots belong to.
    pub(super) region: Arc<Region>,
    /// How many operations have begun. This is also the number of the operation that is running: numbers begin at 1.
    pub(super) operations: usize,
    /// The number of values saved so far, which is the number of the next slot.
    pub(super) saved: usize,
    /// The number of the last operation that saved a value, 0 if none has; a recomputation ends with this operation.
    pub(super) last_saved: usize,
    /// The values that the operation `last_saved` has saved. Of this operation's results, only those among these values
    /// are kept: a recomputation ends there, so it does not read the other results.
    pub(super) saved_by_last: Vec<TensorId>,
    /// The results of expensive operations that [`Policy::Selective`](super::Policy::Selective) keeps for the later
    /// run, each with the number of the operation that computed them.
    pub(super) kept: Vec<(usize, StoredResults)>,
    /// For each variable that the function has read: the counter of its changes in place, and the count at the first
    /// read.
    pub(super) versions: Vec<(Arc<Version>, u64)>,
}

impl Recording {
    pub(super) const fn new(region: Arc<Region>) -> Self {
        Self {
            region,
            operations: 0,
            saved: 0,
            last_saved: 0,
            saved_by_last: Vec::new(),
            kept: Vec::new(),
            versions: Vec::new(),
        }
    }

    /// Adds the variables among `tensors`, which an operation reads, to `versions`.
    pub(super) fn reads(&mut self, tensors: &[&Tensor]) {
        for version in tensors.iter().filter_map(|t| t.version.as_ref()) {
            if !self.versions.iter().any(|(known, _)| Arc::ptr_eq(known, version)) {
                self.versions.push((version.clone(), version.get()));
            }
        }
    }
}

/// The state of a later run of a function, which recomputes the saved values.
pub(super) struct Recomputing {
    /// As [`Recording::operations`].
    pub(super) operations: usize,
    /// The number of the operation with which the recomputation ends.
    pub(super) last_saved: usize,
    /// How many values the first run saved.
    pub(super) expected: usize,
    /// The values recomputed so far.
    pub(super) values: Vec<Raw>,
    /// The kept results that this run has not taken yet.
    pub(super) kept: VecDeque<StoredResults>,
    /// Whether the policy is [`Policy::Selective`](super::Policy::Selective).
    pub(super) selective: bool,
}

thread_local! {
    /// The recorders of nested checkpoints, the innermost last. Only the last one records operations and saved values.
    pub(super) static RECORDERS: RefCell<Vec<Recorder>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a recorder on the stack until the scope is left or dropped, also by an error or a panic.
pub(super) struct Scope {
    /// The index of the recorder in [`RECORDERS`].
    depth: usize,
    grad_was_enabled: bool,
}

impl Scope {
    /// Puts `recorder` on the stack and switches the tape on: a backward pass, which runs the function again, has
    /// switched it off.
    pub(super) fn enter(recorder: Recorder) -> Self {
        let grad_was_enabled = set_grad_enabled(true);
        let depth = RECORDERS.with_borrow_mut(|recorders| {
            recorders.push(recorder);
            recorders.len() - 1
        });
        set_recording(true);
        Self { depth, grad_was_enabled }
    }

    /// Ends the scope and returns its recorder; `None` if another recorder is the innermost one. In both cases, `drop`
    /// runs afterwards: it removes recorders that are left and restores the flags of the thread.
    pub(super) fn leave(self) -> Option<Recorder> {
        RECORDERS.with_borrow_mut(|recorders| if recorders.len() == self.depth + 1 { recorders.pop() } else { None })
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let ended = RECORDERS.with_borrow_mut(|recorders| {
            let ended: Vec<Recorder> = recorders.drain(self.depth.min(recorders.len())..).collect();
            set_recording(!recorders.is_empty());
            ended
        });
        // Dropped after the borrow, because a destructor may use `RECORDERS`.
        drop(ended);
        set_grad_enabled(self.grad_was_enabled);
    }
}
