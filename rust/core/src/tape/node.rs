//! Nodes of the tape: recorded operations and variables.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::backward::BackwardContext;
use super::leaf::Leaf;
use crate::Result;

/// The derivative of one recorded operation, with what it saved.
pub trait Backward: Send + Sync {
    /// Read [`BackwardContext::grad`], the gradient of the result, and [`add`](BackwardContext::add) a gradient for each
    /// input that [`needs`](BackwardContext::needs) one.
    ///
    /// # Errors
    /// Those of the arithmetic; the pass stops there.
    fn backward(&self, context: &mut BackwardContext<'_>) -> Result<()>;
}

pub(crate) type Inputs = SmallVec<[Option<Arc<Node>>; 3]>;

/// One result on the tape.
pub(crate) struct Node {
    /// Creation order: an operation's inputs always have smaller numbers.
    id: u64,
    pub(crate) name: &'static str,
    pub(crate) inputs: Inputs,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    Leaf(Leaf),
    /// `None` once a backward pass has used and freed it.
    Op(Mutex<Option<Box<dyn Backward>>>),
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    pub(crate) fn leaf_node(leaf: Leaf) -> Self {
        Self { id: next_id(), name: "variable", inputs: Inputs::new(), kind: Kind::Leaf(leaf) }
    }

    pub(crate) fn op_node(name: &'static str, inputs: Inputs, backward: Box<dyn Backward>) -> Self {
        Self { id: next_id(), name, inputs, kind: Kind::Op(Mutex::new(Some(backward))) }
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

/// The parts of a dropped node that are still to be dropped.
struct Parts {
    _backward: Option<Box<dyn Backward>>,
    _inputs: Inputs,
}

#[derive(Default)]
struct DropQueue {
    waiting: Vec<Parts>,
    is_draining: bool,
}

thread_local! {
    static DROP_QUEUE: RefCell<DropQueue> = RefCell::default();
}

/// Drops long graphs in a loop instead of recursively: a node that is dropped while another one is being dropped is queued, even
/// if only a closure that a checkpoint keeps refers to it.
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
