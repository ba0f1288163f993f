//! Nodes of the tape: recorded operations and variables.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::backward::BackwardContext;
use super::leaf::Leaf;
use crate::raw::Raw;
use crate::{Error, Result};

/// The derivative of one recorded operation, with the values that the operation saved.
pub trait Backward: Send + Sync {
    /// Read [`BackwardContext::grad`], the gradient of the result, and [`add`](BackwardContext::add) a gradient for
    /// each input that [`needs`](BackwardContext::needs) one.
    ///
    /// # Errors
    /// The errors of the computation. An error ends the whole backward pass.
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()>;

    /// A function that recomputes the operation's result; `None` if the saved values do not suffice for it.
    fn again(&self) -> Option<Again<'_>> {
        None
    }
}

/// Computes the result of an operation from its saved values.
pub type Again<'a> = Box<dyn Fn() -> Result<Raw> + 'a>;

/// The nodes of an operation's inputs; `None` for an input that needs no gradient.
pub(crate) type Inputs = SmallVec<[Option<Arc<Node>>; 3]>;

/// A variable, or the result of one operation, on the tape.
pub(crate) struct Node {
    /// Creation order: an operation's inputs always have smaller numbers.
    id: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Inputs,
    pub(crate) kind: Kind,
    /// Whether operations that need the result in their backward pass recompute it there instead of saving it.
    is_recomputed: AtomicBool,
}

pub(crate) enum Kind {
    Leaf(Leaf),
    /// `None` once a backward pass has used and freed the saved values.
    Op(Mutex<Option<Box<dyn Backward>>>),
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    pub(crate) fn leaf_node(leaf: Leaf) -> Self {
        Self::new("variable", Inputs::new(), Kind::Leaf(leaf))
    }

    pub(crate) fn op_node(name: &'static str, inputs: Inputs, backward: Box<dyn Backward>) -> Self {
        Self::new(name, inputs, Kind::Op(Mutex::new(Some(backward))))
    }

    fn new(name: &'static str, inputs: Inputs, kind: Kind) -> Self {
        Self { id: next_id(), name, inputs, kind, is_recomputed: AtomicBool::new(false) }
    }

    /// Let operations that need the result in their backward pass recompute it there, if [`Backward::again`] can.
    pub(crate) fn set_recomputed(&self) {
        let can_recompute = match &self.kind {
            Kind::Leaf(_) => false,
            Kind::Op(state) => state
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_ref()
                .is_some_and(|backward| backward.again().is_some()),
        };
        self.is_recomputed.store(can_recompute, Ordering::Relaxed);
    }

    pub(crate) fn is_recomputed(&self) -> bool {
        self.is_recomputed.load(Ordering::Relaxed)
    }

    /// The result of an operation, computed again. Callers have checked earlier that the node
    /// [`is_recomputed`](Self::is_recomputed), so it is no leaf, and only freed values can be the reason for an error.
    pub(crate) fn result(&self) -> Result<Raw> {
        let gone = || {
            let message = format!(
                "an earlier backward has freed the values that {} saved; pass retain_graph=True to the first backward \
                 to differentiate again",
                self.name
            );
            Error::autograd("backward", message)
        };
        let Kind::Op(state) = &self.kind else { return Err(gone()) };
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().and_then(|backward| backward.again()).ok_or_else(gone)?()
    }

    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    pub(crate) const fn leaf(&self) -> Option<&Leaf> {
        match &self.kind {
            Kind::Leaf(leaf) => Some(leaf),
            Kind::Op(_) => None,
        }
    }
}

/// The fields of a dropped node. They may hold the last references to other nodes, so they wait in the queue instead of
/// being dropped with their node.
struct Parts {
    _backward: Option<Box<dyn Backward>>,
    _inputs: Inputs,
}

/// The fields of nodes that were dropped on this thread, until these fields are dropped too.
#[derive(Default)]
struct DropQueue {
    waiting: Vec<Parts>,
    is_draining: bool,
}

thread_local! {
    static DROP_QUEUE: RefCell<DropQueue> = RefCell::default();
}

/// Drops long graphs in a loop instead of recursively: a node that is dropped while another node is being dropped is
/// queued. This also applies to nodes that only the closure of a checkpoint refers to.
impl Drop for Node {
    fn drop(&mut self) {
        let backward = match &mut self.kind {
            Kind::Op(state) => state.get_mut().unwrap_or_else(PoisonError::into_inner).take(),
            Kind::Leaf(_) => return,
        };
        let parts = Parts { _backward: backward, _inputs: std::mem::take(&mut self.inputs) };
        // At thread exit the queue may not exist any more; then the parts are dropped here.
        let _ = DROP_QUEUE.try_with(|shared| {
            let mut queue = shared.borrow_mut();
            queue.waiting.push(parts);
            if queue.is_draining {
                return;
            }
            queue.is_draining = true;
            while let Some(next) = queue.waiting.pop() {
                drop(queue);
                drop(next);
                queue = shared.borrow_mut();
            }
            queue.is_draining = false;
        });
    }
}
