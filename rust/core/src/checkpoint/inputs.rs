//! [`KeptInputs`]: the inputs of a checkpointed function, on their device or in the memory of the host.
//!
//! An input that is offloaded is copied to the host while the function runs; the input's memory on the device is freed
//! when the function has returned. The backward pass recomputes checkpoints in reverse order. The recomputation of
//! checkpoint n starts to copy the inputs of checkpoint n - 1 to the device, so that these copies run in parallel with
//! the recomputation.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{Policy, begin_operation, save};
use crate::Result;
use crate::capture;
use crate::cuda::offload::{Arriving, Away};
use crate::raw::Raw;
use crate::tape::{Backward, BackwardContext, Inputs, Leaf, Node, Saved, flags};
use crate::tensor::Tensor;

/// Inputs of fewer bytes stay on the device: a copy would cost more than the freed memory is worth.
const MIN_OFFLOADED_BYTES: usize = 1 << 20;

/// What a checkpoint keeps of its inputs.
pub(super) struct KeptInputs {
    inputs: Vec<(Place, Origin)>,
    /// The inputs in the memory of the host, if there are any.
    offloaded: Option<Arc<Offloaded>>,
}

/// The place of an input until the recomputation.
enum Place {
    /// The input stays on its device.
    Here(Saved),
    /// The input is in the memory of the host, at this index of [`Offloaded::copies`].
    Offloaded(usize),
}

impl KeptInputs {
    /// Keeps the inputs of a function that is about to run.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the host has no more pinned memory;
    /// [`Error::Device`](crate::Error::Device) if a capture would have to allocate pinned memory, or the driver reports
    /// an error.
    pub(super) fn new(inputs: &[&Tensor], policy: Policy) -> Result<Self> {
        // `flags().recording()` says that an outer checkpoint's function runs. An inner checkpoint offloads nothing,
        // because the outer checkpoint frees and recomputes its inputs.
        let offloads = policy == Policy::Offloaded && !flags().recording();
        // Count this checkpoint as an operation of the outer checkpoint; the operation saves these inputs. The outer
        // recomputation ends with the last operation that saves a value. Without the operation counted here, the last
        // one could be the operation that computes an input of this checkpoint, and the recomputation would end before
        // this checkpoint.
        begin_operation();
        let mut copies = Vec::new();
        let mut placed = Vec::with_capacity(inputs.len());
        for &tensor in inputs {
            let origin = Origin::of(tensor);
            if offloads && is_worth_it(tensor, origin) {
                placed.push((Place::Offloaded(copies.len()), origin));
                copies.push(Away::new(&tensor.raw)?);
            } else {
                placed.push((Place::Here(keep(tensor)), origin));
            }
        }
        let offloaded = if copies.is_empty() { None } else { Some(Offloaded::new(copies)) };
        Ok(Self { inputs: placed, offloaded })
    }

    /// Makes the device finish the copies to the host before the memory of the inputs is used again. Called when the
    /// function has returned.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the driver reports an error.
    pub(super) fn settle(&self) -> Result<()> {
        self.offloaded.iter().flat_map(|offloaded| &offloaded.copies).try_for_each(Away::await_copy)
    }

    /// The inputs, for a recomputation.
    ///
    /// # Errors
    /// Those of [`Saved::get`]; [`Error::OutOfMemory`](crate::Error::OutOfMemory) if an offloaded input no longer fits
    /// on the device, [`Error::Device`](crate::Error::Device) if the driver reports an error.
    pub(super) fn get(&self) -> Result<Vec<Tensor>> {
        let arrived = self.offloaded.as_ref().map_or_else(|| Ok(Vec::new()), |offloaded| offloaded.arrived())?;
        let value = |(place, origin): &(Place, Origin)| {
            let raw = match place {
                Place::Here(saved) => saved.get()?,
                Place::Offloaded(index) => arrived[*index].clone(),
            };
            let node = origin.node(&raw).map(Arc::new);
            Ok(Tensor { raw, node, version: None })
        };
        self.inputs.iter().map(value).collect()
    }
}

/// Whether offloading an input frees enough memory: the input is large, contiguous, on a GPU, and the result of an
/// operation. Constants and variables stay on the device anyway.
fn is_worth_it(tensor: &Tensor, origin: Origin) -> bool {
    let bytes = tensor.raw.elem_count() * tensor.raw.dtype().size_in_bytes();
    matches!(origin, Origin::Computed)
        && bytes >= MIN_OFFLOADED_BYTES
        && tensor.raw.is_contiguous()
        && !tensor.raw.device().is_cpu()
}

/// Keeps an input on its device. In the function of an outer checkpoint, this keeps no memory: the result refers to a
/// numbered slot, which the outer checkpoint fills with the input when it recomputes.
fn keep(tensor: &Tensor) -> Saved {
    if flags().recording() { save(&tensor.raw).unwrap_or_else(|| Saved::keep(tensor)) } else { Saved::keep(tensor) }
}

/// The offloaded inputs of one checkpoint.
struct Offloaded {
    /// The copies in the memory of the host, one for each offloaded input.
    copies: Vec<Away>,
    /// The copies to the device, if they are queued already; otherwise empty.
    arriving: Mutex<Vec<Arriving>>,
    /// The offloaded inputs of the checkpoint that ran before this one. A backward pass needs those inputs next.
    previous: Weak<Offloaded>,
    /// Whether the copies to the host are recorded in a CUDA graph.
    is_captured: bool,
}

thread_local! {
    /// The offloaded inputs of the checkpoint that ran last on this thread.
    static LAST: RefCell<Weak<Offloaded>> = const { RefCell::new(Weak::new()) };
}

impl Offloaded {
    /// The offloaded inputs of the checkpoint that runs now. The next call gets them as `previous`.
    fn new(copies: Vec<Away>) -> Arc<Self> {
        LAST.with_borrow_mut(|last| {
            let (previous, is_captured) = (std::mem::take(last), capture::is_capturing());
            let offloaded = Arc::new(Self { copies, arriving: Mutex::default(), previous, is_captured });
            *last = Arc::downgrade(&offloaded);
            offloaded
        })
    }

    /// Queues the copies to the device, unless they are queued already.
    fn start(&self, arriving: &mut Vec<Arriving>) -> Result<()> {
        if arriving.is_empty() {
            *arriving = self.copies.iter().map(Away::fetch).collect::<Result<_>>()?;
        }
        Ok(())
    }

    /// Returns the inputs on the device. Starts the copies for the checkpoint that ran before this one, in parallel
    /// with the work that is queued next.
    fn arrived(&self) -> Result<Vec<Raw>> {
        let arriving = {
            let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
            self.start(&mut arriving)?;
            std::mem::take(&mut *arriving)
        };
        let arrived = arriving.into_iter().map(Arriving::wait).collect::<Result<_>>()?;
        // Start the copies for the previous checkpoint only if both checkpoints ran in a capture or neither did. A copy
        // to the device must wait for the copy of its input to the host, and a recorded copy cannot wait for one that
        // ran eagerly, nor an eager copy for a recorded one.
        if let Some(previous) = self.previous.upgrade().filter(|previous| previous.is_captured == self.is_captured) {
            previous.start(&mut previous.arriving.lock().unwrap_or_else(PoisonError::into_inner))?;
        }
        Ok(arrived)
    }
}

/// The origin of an input. Operations keep references to variables but save computed values. A recomputation must save
/// the same values as the first run, so its inputs must have the same origins.
#[derive(Clone, Copy)]
enum Origin {
    Constant,
    Variable,
    Computed,
}

impl Origin {
    fn of(tensor: &Tensor) -> Self {
        match &tensor.node {
            None => Self::Constant,
            Some(node) if node.leaf().is_some() => Self::Variable,
            Some(_) => Self::Computed,
        }
    }

    /// The node of the input `raw` in a recomputation.
    fn node(self, raw: &Raw) -> Option<Node> {
        match self {
            Self::Constant => None,
            Self::Variable => Some(Node::leaf_node(Leaf::of(raw))),
            Self::Computed => Some(Node::op_node("checkpoint", Inputs::new(), Box::new(MadeElsewhere))),
        }
    }
}

/// The backward function of an input that was computed outside the function. It does nothing, because gradients flow
/// through the nodes of the first run.
struct MadeElsewhere;

impl Backward for MadeElsewhere {
    fn backward(&self, _: &mut BackwardContext<'_>) -> Result<()> {
        Ok(())
    }
}
