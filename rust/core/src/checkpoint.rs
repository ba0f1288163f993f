//! Gradient checkpointing: save little in the forward pass, recompute the rest when the backward pass first needs it.
//!
//! Inside a checkpointed function every node is recorded as usual, but it holds a numbered slot in place of each value
//! that it would save. The slots belong to the [`Region`], which stands for one call of the function. When a backward
//! pass first reads a slot, the region runs the function again, up to the last value that was saved, and fills all
//! slots in order. Gradients flow through the nodes of the first run, so captured variables, several inputs and several
//! outputs need no special treatment.
//!
//! [`Policy::Full`] keeps the function's inputs only (Chen et al. 2016, arXiv:1604.06174). [`Policy::Selective`] also
//! keeps the results of the expensive operations that a recomputation reaches, so that no matrix product runs twice
//! (Korthikanti et al. 2022, arXiv:2205.05198). [`Policy::Offloaded`] is the full policy with large inputs in the
//! memory of the host (see `checkpoint/inputs.rs`).

mod inputs;
mod recorder;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::TensorId;

use self::inputs::KeptInputs;
use self::recorder::{RECORDERS, Recomputing, Recorder, Recording, Scope};
use crate::capture::Version;
use crate::memory::SavedBytes;
use crate::raw::Raw;
use crate::rng;
use crate::tape::{Cost, OpInfo, Saved, flags};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// What a checkpoint saves between the forward and the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Saves everything that the backward pass reads; nothing is recomputed.
    None,
    /// Saves the inputs of the function. All else is recomputed.
    #[default]
    Full,
    /// Saves the inputs and the results of expensive operations. Only cheap operations (norms, activations, sums) are
    /// recomputed.
    Selective,
    /// As [`Full`](Self::Full), but large inputs wait for the backward pass in the memory of the host. They are copied
    /// to the host while the function runs, and back while the backward pass recomputes the checkpoint that ran after
    /// this one. On the CPU and inside another checkpoint, the policy is the same as [`Full`](Self::Full).
    Offloaded,
}

impl Policy {
    /// Whether everything but the inputs is recomputed.
    pub const fn recomputes_all(self) -> bool {
        matches!(self, Self::Full | Self::Offloaded)
    }
}

impl std::str::FromStr for Policy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "none" => Ok(Self::None),
            "full" => Ok(Self::Full),
            "selective" => Ok(Self::Selective),
            "offload" => Ok(Self::Offloaded),
            other => Err(Error::argument(
                "checkpoint",
                format!("unknown policy \"{other}\"; expected \"none\", \"full\", \"selective\" or \"offload\""),
            )),
        }
    }
}

/// The error that ends a checkpointed function once all needed values are recomputed. It propagates through the
/// function with `?`, and [`backward`](crate::Tensor::backward) never returns it.
#[derive(Debug, thiserror::Error)]
#[error("checkpoint: recomputation is complete")]
pub(crate) struct Complete;

type Function = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync>;

/// Runs `function` on `inputs` and keeps only the inputs; the backward pass recomputes the function's inner values.
///
/// The function must compute the same values when it is called again; random numbers are repeated (dropout draws the
/// same mask). The function is kept until the backward pass, so it must own what it uses (use `move`; clones of tensors
/// and layers are cheap).
///
/// # Errors
/// Those of `function`.
pub fn checkpoint<F>(function: F, inputs: &[&Tensor]) -> Result<Tensor>
where
    F: Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
{
    let mut outputs = checkpoint_with(Policy::Full, move |xs| Ok(vec![function(xs)?]), inputs)?;
    Ok(outputs.remove(0))
}

/// [`checkpoint`] with a [`Policy`], for functions with several results.
///
/// # Errors
/// Those of `function`. With [`Policy::Offloaded`], also [`Error::OutOfMemory`] if the system gives too little pinned
/// memory for the inputs, and [`Error::Device`] if the driver reports an error.
pub fn checkpoint_with<F>(policy: Policy, function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    let owned: Vec<Tensor> = inputs.iter().map(|&t| t.clone()).collect();
    if policy == Policy::None || !flags().grad_enabled() {
        return function(&owned);
    }
    let region = Arc::new(Region {
        policy,
        inputs: KeptInputs::new(inputs, policy)?,
        function: Box::new(function),
        state: Mutex::default(),
    });
    let scope = Scope::enter(Recorder::Record(Recording::new(region.clone())));
    let rng_recording = rng::Recording::begin();
    let outputs = (region.function)(&owned)?;
    let draws = rng_recording.finish();
    if let Some(Recorder::Record(recording)) = scope.leave() {
        region.seal(recording, draws);
    }
    // Copies of offloaded inputs to the host must end before the memory of the inputs is used again.
    region.inputs.settle()?;
    Ok(outputs)
}

/// One call of a checkpointed function.
pub(crate) struct Region {
    policy: Policy,
    inputs: KeptInputs,
    function: Function,
    state: Mutex<RegionState>,
}

#[derive(Default)]
struct RegionState {
    slots: Vec<Slot>,
    /// The kept results that a recomputation reaches, in the order of their operations.
    kept: Vec<StoredResults>,
    /// The number of the last operation that saved a value; a recomputation ends with this operation.
    last_saved: usize,
    /// For each variable that the function has read: the counter of its changes in place, and the count at the first
    /// read.
    versions: Vec<(Arc<Version>, u64)>,
    /// The random draws of the first run, which a recomputation repeats.
    draws: Vec<rng::Draw>,
}

/// The place of a value that a node of the function would have saved.
enum Slot {
    /// The value is not recomputed yet.
    Waiting,
    Filled {
        value: Raw,
        /// Counts the value as saved memory.
        _bytes: SavedBytes,
    },
    /// No node needs the value any more.
    Released,
}

/// The results of an expensive operation, kept for the recomputation.
#[derive(Clone)]
struct StoredResults {
    /// The name of the operation.
    name: &'static str,
    /// The operation's result, then its auxiliary values.
    results: Vec<Raw>,
    /// Counts the results as saved memory.
    bytes: Arc<Vec<SavedBytes>>,
}

impl StoredResults {
    fn new(name: &'static str, results: Vec<Raw>) -> Self {
        let bytes = Arc::new(results.iter().map(SavedBytes::new).collect());
        Self { name, results, bytes }
    }

    /// Replaces each result that is not among `saved` with a zero broadcast to the result's shape, which frees the
    /// memory of the result. A recomputation ends with this operation, so nothing reads the results that were not
    /// saved.
    fn forget_all_but(&mut self, saved: &[TensorId]) {
        for result in &mut self.results {
            if !saved.contains(&result.id()) {
                let zero = Raw::zeros((), result.dtype(), result.device());
                if let Ok(stand_in) = zero.and_then(|z| z.broadcast_as(result.shape())) {
                    *result = stand_in;
                }
            }
        }
        self.bytes = Arc::new(self.results.iter().map(SavedBytes::new).collect());
    }
}

impl Region {
    fn state(&self) -> MutexGuard<'_, RegionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores what the first run of the function has recorded.
    fn seal(&self, recording: Recording, draws: Vec<rng::Draw>) {
        let mut state = self.state();
        // Slots of nodes that were dropped inside the function are released already.
        state.slots.resize_with(recording.saved, || Slot::Waiting);
        state.versions = recording.versions;
        state.draws = draws;
        state.last_saved = recording.last_saved;
        for (operation, mut kept) in recording.kept {
            if operation == recording.last_saved {
                kept.forget_all_but(&recording.saved_by_last);
            }
            // A recomputation does not reach later operations.
            if operation <= recording.last_saved {
                state.kept.push(kept);
            }
        }
    }

    /// The value of a slot, recomputed if necessary.
    ///
    /// # Errors
    /// [`Error::Autograd`] if a variable that the function has read was changed in place, or if the function behaves
    /// differently when it is run again; the errors of the function and of reading its inputs.
    pub(crate) fn value(&self, index: usize) -> Result<Raw> {
        if let Some(Slot::Filled { value, .. }) = self.state().slots.get(index) {
            return Ok(value.clone());
        }
        self.recompute()?;
        match self.state().slots.get(index) {
            Some(Slot::Filled { value, .. }) => Ok(value.clone()),
            _ => Err(nondeterministic()),
        }
    }

    /// Frees the value of a slot that no node needs any more.
    pub(crate) fn release(&self, index: usize) {
        let mut state = self.state();
        if state.slots.len() <= index {
            state.slots.resize_with(index + 1, || Slot::Waiting);
        }
        let old = std::mem::replace(&mut state.slots[index], Slot::Released);
        // Unlock the state before the value is freed.
        drop(state);
        drop(old);
    }

    /// Runs the function again and fills all slots that are waiting.
    fn recompute(&self) -> Result<()> {
        let (expected, last_saved, kept, draws) = {
            let state = self.state();
            for (version, count) in &state.versions {
                if version.get() != *count {
                    return Err(Error::autograd(
                        "checkpoint",
                        "a variable of a checkpointed function was changed in place; change it after backward()",
                    ));
                }
            }
            let kept = state.kept.iter().cloned().collect::<VecDeque<_>>();
            (state.slots.len(), state.last_saved, kept, state.draws.clone())
        };
        let inputs = self.inputs.get()?;
        let selective = self.policy == Policy::Selective;
        let scope = Scope::enter(Recorder::Recompute(Recomputing {
            operations: 0,
            last_saved,
            expected,
            values: Vec::with_capacity(expected),
            kept,
            selective,
        }));
        let repeating = rng::Repeating::begin(draws);
        let outcome = (self.function)(&inputs);
        let draws_differ = repeating.finish();
        let Some(Recorder::Recompute(recomputing)) = scope.leave() else { return Err(nondeterministic()) };
        match outcome {
            _ if draws_differ => return Err(nondeterministic()),
            // All values have been recomputed. In most cases the outcome is the error [`Complete`], perhaps wrapped in
            // another error. Only operations end with this error: if the last values are the inputs of an inner
            // checkpoint, which are saved outside of operations, the function may have returned.
            _ if recomputing.values.len() == expected => {}
            Ok(_) => return Err(nondeterministic()),
            Err(error) => return Err(error),
        }
        let mut state = self.state();
        for (slot, value) in state.slots.iter_mut().zip(recomputing.values) {
            if matches!(slot, Slot::Waiting) {
                let _bytes = SavedBytes::new(&value);
                *slot = Slot::Filled { value, _bytes };
            }
        }
        Ok(())
    }
}

fn nondeterministic() -> Error {
    Error::autograd(
        "checkpoint",
        "the function computed something else when it was run again; it must not depend on anything that changes \
         between calls",
    )
}

/// Whether the innermost checkpoint is selective: it then keeps the results of expensive operations.
pub(crate) fn is_selective() -> bool {
    RECORDERS.with_borrow(|recorders| match recorders.last() {
        Some(Recorder::Record(recording)) => recording.region.policy == Policy::Selective,
        Some(Recorder::Recompute(recomputing)) => recomputing.selective,
        None => false,
    })
}

/// Runs one operation of a checkpointed function. `forward` computes the result and the auxiliary values, which a
/// selective checkpoint keeps if the operation is expensive; a recomputation takes kept results instead of computing.
pub(crate) fn run<A>(
    op: &'static OpInfo,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<(Raw, A)>,
) -> Result<(Raw, A)>
where
    A: FromIterator<Raw> + AsRef<[Raw]>,
{
    enum Plan {
        Compute,
        ComputeAndKeep,
        Take(StoredResults),
    }
    reads(inputs);
    begin_operation();
    let plan = RECORDERS.with_borrow_mut(|recorders| match recorders.last_mut() {
        Some(Recorder::Record(recording)) => {
            let keep = recording.region.policy == Policy::Selective && op.cost == Cost::Expensive;
            Ok(if keep { Plan::ComputeAndKeep } else { Plan::Compute })
        }
        Some(Recorder::Recompute(recomputing)) if recomputing.selective && op.cost == Cost::Expensive => {
            match recomputing.kept.pop_front() {
                Some(kept) if kept.name == op.name => Ok(Plan::Take(kept)),
                _ => Err(nondeterministic()),
            }
        }
        _ => Ok(Plan::Compute),
    })?;
    match plan {
        Plan::Compute => forward(),
        Plan::ComputeAndKeep => {
            let (result, aux) = forward()?;
            let results: Vec<Raw> = std::iter::once(&result).chain(aux.as_ref()).cloned().collect();
            let kept = StoredResults::new(op.name, results);
            RECORDERS.with_borrow_mut(|recorders| {
                if let Some(Recorder::Record(recording)) = recorders.last_mut() {
                    let operation = recording.operations;
                    recording.kept.push((operation, kept));
                }
            });
            Ok((result, aux))
        }
        Plan::Take(kept) => {
            let mut results = kept.results.into_iter();
            let result = results.next().ok_or_else(nondeterministic)?;
            Ok((result, results.collect()))
        }
    }
}

/// Records the tensors that an operation reads, for the innermost checkpoint and for all checkpoints around it.
/// Variables among these tensors must not change before the recomputation. [`run`] records the inputs of an operation;
/// operations call `reads` for all other tensors, such as masks, tables, frozen weights and the operands of
/// comparisons.
pub(crate) fn reads(tensors: &[&Tensor]) {
    // Only variables and their views have a `version`, the counter of changes in place.
    if !flags().recording() || tensors.iter().all(|tensor| tensor.version.is_none()) {
        return;
    }
    RECORDERS.with_borrow_mut(|recorders| {
        for recorder in recorders {
            if let Recorder::Record(recording) = recorder {
                recording.reads(tensors);
            }
        }
    });
}

/// Counts one more operation of the innermost checkpoint.
fn begin_operation() {
    RECORDERS.with_borrow_mut(|recorders| match recorders.last_mut() {
        Some(Recorder::Record(recording)) => recording.operations += 1,
        Some(Recorder::Recompute(recomputing)) => recomputing.operations += 1,
        None => {}
    });
}

/// Whether a recomputation ends with the operation that is running. Nothing will then read the operation's result,
/// unless the operation itself saves the result.
pub(crate) fn ends_here() -> bool {
    let is_last = |recorders: &Vec<Recorder>| match recorders.last() {
        Some(Recorder::Recompute(recomputing)) => recomputing.operations == recomputing.last_saved,
        _ => false,
    };
    flags().recording() && RECORDERS.with_borrow(is_last)
}

/// Whether the innermost checkpoint is being recomputed.
pub(crate) fn is_recomputing() -> bool {
    flags().recording() && RECORDERS.with_borrow(|recorders| matches!(recorders.last(), Some(Recorder::Recompute(_))))
}

/// Returns what a node of a checkpointed function saves instead of the value `raw`: a slot in the first run, nothing in
/// a recomputation, which collects the value for its slot. `None` outside of checkpointed functions.
pub(crate) fn save(raw: &Raw) -> Option<Saved> {
    RECORDERS.with_borrow_mut(|recorders| match recorders.last_mut()? {
        Recorder::Record(recording) => {
            let index = recording.saved;
            recording.saved += 1;
            if recording.last_saved != recording.operations {
                recording.last_saved = recording.operations;
                recording.saved_by_last.clear();
            }
            recording.saved_by_last.push(raw.id());
            Some(Saved::slot(recording.region.clone(), index))
        }
        Recorder::Recompute(recomputing) => {
            if recomputing.values.len() < recomputing.expected {
                recomputing.values.push(raw.clone());
            }
            Some(Saved::nothing())
        }
    })
}

/// Ends a recomputation with the error [`Complete`] when all saved values have been recomputed.
pub(crate) fn stop_if_complete() -> Result<()> {
    RECORDERS.with_borrow(|recorders| match recorders.last() {
        Some(Recorder::Recompute(recomputing)) if recomputing.values.len() == recomputing.expected => {
            Err(Error::External(Box::new(Complete)))
        }
        _ => Ok(()),
    })
}
