//! Nodes of the tape: recorded operations and the leaves that collect gradients.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape};
use smallvec::SmallVec;

use super::backward::BackwardContext;
use crate::copies::Copies;
use crate::cpu::Add;
use crate::raw::{self, Raw};
use crate::{Error, Result, capture, compute};

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
struct Remains {
    _backward: Option<Box<dyn Backward>>,
    _inputs: Inputs,
}

#[derive(Default)]
struct Graveyard {
    waiting: Vec<Remains>,
    draining: bool,
}

thread_local! {
    static GRAVEYARD: RefCell<Graveyard> = RefCell::default();
}

/// Long graphs are dropped in a loop: a node that dies while another is being dropped is queued, not entered, also when it
/// hangs on a closure that a checkpoint keeps.
impl Drop for Node {
    fn drop(&mut self) {
        let backward = match &mut self.kind {
            Kind::Op(state) => state.get_mut().unwrap_or_else(PoisonError::into_inner).take(),
            Kind::Leaf(_) => return,
        };
        let remains = Remains { _backward: backward, _inputs: std::mem::take(&mut self.inputs) };
        // At thread exit the queue may be gone; then the remains simply drop here.
        let _ = GRAVEYARD.try_with(|graveyard| {
            let mut queue = graveyard.borrow_mut();
            queue.waiting.push(remains);
            if queue.draining {
                return;
            }
            queue.draining = true;
            while let Some(next) = queue.waiting.pop() {
                drop(queue);
                drop(next);
                queue = graveyard.borrow_mut();
            }
            queue.draining = false;
        });
    }
}

/// The gradient of a variable.
pub(crate) struct Leaf {
    shape: Shape,
    dtype: DType,
    state: Arc<Mutex<GradState>>,
    copies: Mutex<Copies>,
}

#[derive(Default)]
struct GradState {
    grad: Option<Raw>,
    /// A view of a flat gradient buffer: gradients are then added in place, never moved.
    buffer: Option<Raw>,
    /// The flat buffer, and where in it the view lies.
    flat: Option<(Raw, Range<usize>)>,
    /// Whether the buffer holds a gradient (it may hold zeros from the last `clear`).
    filled: bool,
}

impl GradState {
    /// The gradient where it lies, if there is one.
    fn current(&self) -> Option<&Raw> {
        match &self.buffer {
            Some(buffer) => self.filled.then_some(buffer),
            None => self.grad.as_ref(),
        }
    }

    /// The storage that [`current`](Self::current) lies in.
    fn place(&self) -> Option<usize> {
        self.current().map(|grad| raw::storage_identity(grad).0)
    }

    fn vector(&self) -> Option<(Raw, Range<usize>)> {
        let buffer = self.buffer.as_ref()?;
        let whole = || buffer.reshape(buffer.elem_count()).ok().map(|vector| (vector, 0..buffer.elem_count()));
        self.flat.clone().or_else(whole)
    }
}

impl Leaf {
    pub(crate) fn new(shape: Shape, dtype: DType) -> Self {
        Self { shape, dtype, state: Arc::default(), copies: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, GradState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The gradient: the tensor itself, or a copy of the buffer's part.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no memory for the copy.
    pub(crate) fn grad(&self) -> Result<Option<Raw>> {
        let state = self.state();
        self.observe(&state);
        match &state.buffer {
            Some(buffer) => state.filled.then(|| raw::own_copy(buffer)).transpose(),
            None => Ok(state.grad.clone()),
        }
    }

    /// The gradient where it lies.
    pub(crate) fn grad_storage(&self) -> Option<Raw> {
        let state = self.state();
        self.observe(&state);
        state.current().cloned()
    }

    /// The gradient is about to change, by work on a device.
    fn touch(&self, device: &Device) {
        capture::touch(|| self.cell(device));
    }

    /// Work depends on whether there is a gradient, and where.
    fn observe(&self, state: &GradState) {
        // A cell that is only observed is not settled: any device will do.
        capture::observe(|| self.cell(&Device::Cpu), || state.place());
    }

    fn cell(&self, device: &Device) -> GradientCell {
        GradientCell { state: self.state.clone(), shape: self.shape.clone(), dtype: self.dtype, device: device.clone() }
    }

    /// The vector that gradients are collected in, and where in it, if there is a gradient.
    pub(crate) fn vector(&self) -> Option<(Raw, Range<usize>)> {
        let state = self.state();
        self.observe(&state);
        state.vector().filter(|_| state.filled)
    }

    /// As [`vector`](Self::vector), if it is to be cleared: before a replay there may be a gradient where there is none now.
    pub(crate) fn vector_to_clear(&self) -> Option<(Raw, Range<usize>)> {
        let state = self.state();
        state.vector().filter(|_| state.filled || capture::is_capturing())
    }

    /// Whether gradients are collected in a vector.
    pub(crate) fn is_bound(&self) -> bool {
        self.state().buffer.is_some()
    }

    /// Change the gradient, if there is one, by a function that writes in place.
    pub(crate) fn change(&self, change: impl FnOnce(&Raw) -> Result<()>) -> Result<()> {
        let mut state = self.state();
        if let Some(buffer) = &state.buffer {
            return if state.filled { change(buffer) } else { Ok(()) };
        }
        // A gradient that was read must not change.
        if let Some(grad) = &state.grad {
            let changed = raw::own_copy(grad)?;
            change(&changed)?;
            state.grad = Some(changed);
        }
        Ok(())
    }

    /// The copies of the variable's values in other dtypes.
    pub(crate) fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn clear(&self) -> Result<()> {
        let mut state = self.state();
        state.grad = None;
        // Before a replay there may be a gradient where there is none now.
        let is_due = state.filled || capture::is_capturing();
        if let Some(buffer) = state.buffer.as_ref().filter(|_| is_due) {
            compute::fill(buffer, 0.0)?;
            self.touch(buffer.device());
        }
        state.filled = false;
        Ok(())
    }

    /// Clear the gradient, whose part of the vector is zeroed already.
    pub(crate) fn is_cleared(&self) {
        let mut state = self.state();
        if let Some(buffer) = &state.buffer {
            self.touch(buffer.device());
        }
        state.filled = false;
        state.grad = None;
    }

    /// Collect gradients in a part of the vector `flat` from now on (zeroed by its owner).
    pub(crate) fn bind(&self, flat: &Raw, part: Range<usize>) -> Result<()> {
        let view = flat.narrow(0, part.start, part.len())?.reshape(&self.shape)?;
        let existing = {
            let mut state = self.state();
            state.buffer = Some(view);
            state.flat = Some((flat.clone(), part));
            state.grad.take()
        };
        existing.map_or(Ok(()), |grad| self.accumulate(grad))
    }

    pub(crate) fn replace(&self, grad: &Raw) -> Result<()> {
        self.touch(grad.device());
        let mut state = self.state();
        if let Some(buffer) = &state.buffer {
            compute::copy_into(buffer, grad)?;
            state.filled = true;
        } else {
            state.grad = Some(raw::own_copy(grad)?);
        }
        Ok(())
    }

    /// The buffer that gradients are collected in, if it takes products of a and b: it is to be added to.
    pub(crate) fn product_buffer(&self, a: &Raw, b: &Raw) -> Option<Raw> {
        let short = matches!(a.dtype(), DType::F16 | DType::BF16);
        let is_product = self.shape.dims() == [a.dims()[0], b.dims()[1]]
            && (self.dtype == a.dtype() || (short && self.dtype == DType::F32));
        let mut state = self.state();
        let buffer = state.buffer.clone().filter(|_| is_product)?;
        self.touch(buffer.device());
        state.filled = true;
        Some(buffer)
    }

    /// Add `grad` (of the variable's shape) in the variable's dtype.
    pub(crate) fn accumulate(&self, grad: Raw) -> Result<()> {
        debug_assert_eq!(grad.dims(), self.shape.dims());
        self.touch(grad.device());
        let mut state = self.state();
        if let Some(buffer) = &state.buffer {
            compute::accumulate(buffer, &grad)?;
            state.filled = true;
            return Ok(());
        }
        if capture::is_capturing() {
            return Err(Error::autograd(
                "capture",
                "the function makes a gradient for a variable that its first call made none for; it must do the same in each call",
            ));
        }
        // A gradient that was read must not change: sums go to new storage.
        let sum = match &state.grad {
            Some(old) => compute::binary(old, &cast(grad, self.dtype)?, Add)?,
            None => compute::contiguous(&cast(grad, self.dtype)?)?,
        };
        state.grad = Some(sum);
        Ok(())
    }
}

/// The gradient of a variable that a captured function changes.
pub(crate) struct GradientCell {
    state: Arc<Mutex<GradState>>,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl GradientCell {
    fn state(&self) -> MutexGuard<'_, GradState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Collect gradients in place from now on, in a buffer that has what there is. False if they are already.
    pub(crate) fn settle(&self) -> Result<bool> {
        let mut state = self.state();
        if state.buffer.is_some() {
            return Ok(false);
        }
        let existing = state.grad.take();
        state.filled = existing.is_some();
        state.buffer = Some(match existing {
            Some(grad) => raw::own_copy(&grad)?,
            None => compute::zeros(self.shape.dims(), self.dtype, &self.device)?,
        });
        Ok(true)
    }

    /// The storage that the gradient lies in, if there is one.
    pub(crate) fn place(&self) -> Option<usize> {
        self.state().place()
    }

    pub(crate) fn is_filled(&self) -> bool {
        self.state().filled
    }

    pub(crate) fn set_filled(&self, filled: bool) {
        self.state().filled = filled;
    }
}

fn cast(raw: Raw, dtype: DType) -> Result<Raw> {
    if raw.dtype() == dtype { Ok(raw) } else { compute::cast(&raw, dtype) }
}
