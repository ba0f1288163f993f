//! The backward pass.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use candle_core::{DType, Shape};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::grad_store::GradStore;
use super::mode::no_grad;
use super::node::{Kind, Node};
pub(crate) use super::pending::Pending;
use crate::compute::{Destination, LowRankTerm, Product};
use crate::interrupt::Interrupt;
use crate::{Error, Raw, Result, Tensor, compute, raw};

/// Products that are added to the gradient buffers of variables. On CUDA, products wait until the storages of their
/// operands together have 80 MiB, or until the pass ends; then many of them run in one launch. There is a limit because
/// the storages stay in memory until the products run.
#[derive(Default)]
struct Buffered {
    /// The ids of the variables with such products.
    variables: FxHashSet<u64>,
    waiting: Vec<Product>,
    /// The addresses of the storages of the operands of waiting products.
    storages: FxHashSet<usize>,
    /// The bytes of these storages. An operand may be a view of a much larger storage.
    bytes: usize,
}

impl Buffered {
    const MOST_BYTES: usize = 80 << 20;

    fn add(&mut self, variable: u64, product: Product) -> Result<()> {
        self.variables.insert(variable);
        for operand in [&product.a, &product.b] {
            let (address, bytes) = raw::storage_identity(operand);
            self.bytes += if self.storages.insert(address) { bytes } else { 0 };
        }
        let waits = !product.a.device().is_cpu();
        self.waiting.push(product);
        if waits { Ok(()) } else { self.run() }
    }

    /// Run the waiting products if their operands take too much memory. This is called after each node, so that the
    /// products of one node run together.
    fn run_if_large(&mut self) -> Result<()> {
        if self.bytes < Self::MOST_BYTES { Ok(()) } else { self.run() }
    }

    fn run(&mut self) -> Result<()> {
        self.bytes = 0;
        self.storages.clear();
        compute::products(&std::mem::take(&mut self.waiting)).map(drop)
    }
}

/// The interface of a node's backward pass: the gradient of its result, and the destinations of its inputs' gradients.
pub struct BackwardContext<'a> {
    node: &'a Node,
    grad: Raw,
    /// The ids of the nodes that need a gradient; `None` if all do.
    wanted: Option<&'a FxHashSet<u64>>,
    /// The gradients of the nodes that the pass has reached and not visited yet, by the node's id.
    table: &'a mut FxHashMap<u64, Pending>,
    /// Products for the gradient buffers of variables; `None` if the pass does not change the gradients of variables.
    buffered: Option<&'a mut Buffered>,
    /// The indices of the inputs that have got a gradient in `table`.
    reached: SmallVec<[usize; 3]>,
}

impl BackwardContext<'_> {
    /// The gradient of the result, in the result's shape and dtype. May be a strided view.
    pub const fn grad(&self) -> &Raw {
        &self.grad
    }

    /// Whether input `index` exists and needs a gradient in this pass.
    pub fn needs(&self, index: usize) -> bool {
        self.node
            .inputs
            .get(index)
            .and_then(Option::as_ref)
            .is_some_and(|n| self.wanted.is_none_or(|w| w.contains(&n.id())))
    }

    /// Add `grad` (in the input's shape and dtype) to the gradient of input `index`. The first `grad` of an input is
    /// kept without a copy, and may be a strided view; later ones are added to it.
    pub fn add(&mut self, index: usize, grad: Raw) -> Result<()> {
        self.add_pending(index, Pending::new(grad, /* owned */ false))
    }

    /// As [`add`](Self::add), with a gradient that says whether its storage may be changed (`owned`).
    pub(crate) fn add_pending(&mut self, index: usize, grad: Pending) -> Result<()> {
        let Some(id) = self.reach(index) else { return Ok(()) };
        match self.table.get_mut(&id) {
            Some(pending) => pending.add(&grad.sum),
            None => {
                self.table.insert(id, grad);
                Ok(())
            }
        }
    }

    /// Take out the gradient that input `index` has so far, if it is complete, contiguous and of `dtype`. A kernel can
    /// then add a further gradient in the launch that computes it. The caller must [`add`](Self::add) the sum.
    #[cfg(feature = "cuda")]
    pub(crate) fn take_pending(&mut self, index: usize, dtype: DType) -> Option<Pending> {
        let id = self.node.inputs.get(index)?.as_ref()?.id();
        let fits = |p: &Pending| p.sum.is_contiguous() && p.sum.dtype() == dtype && p.is_complete();
        if self.table.get(&id).is_some_and(fits) { self.table.remove(&id) } else { None }
    }

    /// Add `grad` to the gradient of input `index`, at the indices from `start` on along dimension `dim`. The gradient
    /// of the input has the shape `dims`; its other elements are zero unless another gradient is added there.
    pub fn add_part(&mut self, index: usize, dims: &[usize], dim: usize, start: usize, grad: &Raw) -> Result<()> {
        let part = start..start + grad.dims()[dim];
        if let Some(view) = self.part(index, (grad, dims), dim, part.clone())? {
            return compute::copy_into(&view, grad);
        }
        let Some(pending) = self.reach(index).and_then(|id| self.table.get_mut(&id)) else { return Ok(()) };
        pending.complete()?; // Sets elements that are not written yet to zero.
        if !pending.owned {
            pending.sum = raw::own_copy(&pending.sum)?;
            pending.owned = true;
        }
        compute::accumulate(&pending.sum.narrow(dim, part.start, part.len())?, grad)
    }

    /// A view of the gradient of input `index` at the indices `part` along dimension `dim`. The caller must write the
    /// whole view. `None` if the input needs no gradient, if some of the view has been written already, or if the
    /// gradient is written in parts along another dimension; use [`add_part`](Self::add_part) then. The gradient has
    /// the shape `dims`, and the dtype and the device of `like`.
    pub(crate) fn part(
        &mut self,
        index: usize,
        (like, dims): (&Raw, &[usize]),
        dim: usize,
        part: Range<usize>,
    ) -> Result<Option<Raw>> {
        let Some(id) = self.reach(index) else { return Ok(None) };
        let pending = match self.table.entry(id) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let sum = compute::unset("backward", like, dims)?;
                entry.insert(Pending::unset(sum, dim))
            }
        };
        pending.take(dim, &part)
    }

    /// Add the matrix product `alpha` a b to the gradient of input `index`. The gradient has the shape `dims`, with as
    /// many elements as the product. Its dtype is `dtype`: the dtype of a and b, or f32 if a and b are f16 or bf16.
    ///
    /// If the input is a variable with a gradient buffer, or has a gradient that can change in place, the product
    /// kernel adds to this buffer or gradient: there is no temporary tensor and no separate addition.
    pub fn add_product(
        &mut self,
        index: usize,
        dims: impl Into<Shape>,
        dtype: DType,
        [a, b]: [&Raw; 2],
        alpha: f64,
    ) -> Result<()> {
        if !self.needs(index) {
            return Ok(());
        }
        if let (Some(buffered), Some(node)) = (self.buffered.as_deref_mut(), &self.node.inputs[index])
            && let Some(sum) = node.leaf().and_then(|leaf| leaf.product_buffer(a, b))
        {
            return buffered.add(node.id(), Product { a: a.clone(), b: b.clone(), alpha, to: Destination::Sum(sum) });
        }
        let Some(id) = self.reach(index) else { return Ok(()) };
        match self.table.get_mut(&id) {
            Some(pending) if pending.owned && pending.sum.is_contiguous() && pending.sum.dtype() == dtype => {
                pending.complete()?;
                let sum = pending.sum.reshape((a.dims()[0], b.dims()[1]))?;
                compute::matmul_accumulate(&sum, a, b, alpha)
            }
            Some(pending) => pending.add(&compute::product(a, b, alpha, dtype)?.reshape(dims)?),
            None => {
                let sum = compute::product(a, b, alpha, dtype)?.reshape(dims)?;
                self.table.insert(id, Pending::new(sum, /* owned */ true));
                Ok(())
            }
        }
    }

    /// [`add_product`](Self::add_product) for each pair [a, b], with `alpha` 1 and the dtype of a.
    pub fn add_products(&mut self, index: usize, dims: impl Into<Shape>, pairs: &[[Raw; 2]]) -> Result<()> {
        let (Some([a, b]), dims) = (pairs.first(), dims.into()) else { return Ok(()) };
        let (dtype, matrix) = (a.dtype(), (a.dims()[0], b.dims()[1]));
        if let Some(sum) = self.owned_sum(index, dtype)? {
            let sum = sum.reshape(matrix)?;
            let terms: Vec<[&Raw; 3]> = pairs.iter().map(|[a, b]| [&sum, a, b]).collect();
            let (alpha, accumulate) = (1.0, true);
            return compute::write_products(&terms, alpha, accumulate);
        }
        pairs.iter().try_for_each(|[a, b]| self.add_product(index, &dims, dtype, [a, b], 1.0))
    }

    /// The gradient that input `index` has so far, if it can change in place and is of `dtype`. The caller must add
    /// another gradient to it.
    fn owned_sum(&mut self, index: usize, dtype: DType) -> Result<Option<Raw>> {
        let node = self.node.inputs.get(index).and_then(Option::as_ref).filter(|_| self.needs(index));
        let pending = node.map(|node| node.id()).and_then(|id| self.table.get_mut(&id));
        let Some(pending) = pending.filter(|p| p.owned && p.sum.is_contiguous() && p.sum.dtype() == dtype) else {
            return Ok(None);
        };
        pending.complete()?;
        let sum = pending.sum.clone();
        self.reach(index);
        Ok(Some(sum))
    }

    /// The gradient buffer of input `index`, a variable; the caller must add a gradient to it. `None` if the input
    /// needs no gradient or has no buffer of `dtype`, or if the pass does not change the gradients of variables: the
    /// caller then passes the gradient to [`add`](Self::add).
    #[cfg(feature = "cuda")]
    pub(crate) fn buffer(&mut self, index: usize, dtype: DType) -> Option<Raw> {
        let (true, Some(buffered)) = (self.needs(index), self.buffered.as_deref_mut()) else { return None };
        let node = self.node.inputs.get(index)?.as_ref()?;
        let leaf = node.leaf().filter(|leaf| leaf.dtype() == dtype)?;
        let buffer = leaf.buffer()?;
        buffered.variables.insert(node.id());
        Some(buffer)
    }

    /// For each of `terms`, write hidden = s₁ · input · down and add s₂ · hidden · up to the gradient of input `index`;
    /// `scales` has s₁ and s₂. The shape and the dtype of the gradient are as in [`add_product`](Self::add_product). If
    /// the input already has a gradient that can change in place, it changes in place.
    pub fn add_low_rank(
        &mut self,
        index: usize,
        dims: impl Into<Shape>,
        terms: Vec<LowRankTerm>,
        scales: [f64; 2],
    ) -> Result<()> {
        let (Some(first), dims) = (terms.first(), dims.into()) else { return Ok(()) };
        let (dtype, matrix) = (first.input.dtype(), (first.input.dims()[0], first.up.dims()[1]));
        if let Some(sum) = self.owned_sum(index, dtype)? {
            let dst = sum.reshape(matrix)?;
            let terms: Vec<_> = terms.into_iter().map(|term| (term, dst.clone())).collect();
            return compute::low_rank(&terms, scales);
        }
        for LowRankTerm { input, down, up, hidden } in &terms {
            compute::write_products(&[[hidden, input, down]], scales[0], /* accumulate */ false)?;
            self.add_product(index, &dims, dtype, [hidden, up], scales[1])?;
        }
        Ok(())
    }

    /// Note that input `index` gets a gradient. Returns the id of its node; `None` if the input needs no gradient.
    fn reach(&mut self, index: usize) -> Option<u64> {
        if !self.needs(index) {
            return None;
        }
        self.reached.push(index);
        self.node.inputs[index].as_ref().map(|n| n.id())
    }
}

/// A node in the heap. The youngest node, which has the highest id, comes first: before the nodes of its inputs.
struct Youngest(Arc<Node>);

impl PartialEq for Youngest {
    fn eq(&self, other: &Self) -> bool {
        self.0.id() == other.0.id()
    }
}

impl Eq for Youngest {}

impl PartialOrd for Youngest {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Youngest {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.id().cmp(&other.0.id())
    }
}

/// Run the backward pass from `root`, whose gradient is `seed`. Only nodes in `wanted` get gradients (`None`: all
/// nodes). `finish` gets each node of `targets` (`None`: each leaf) and its gradient.
fn differentiate(
    root: &Arc<Node>,
    seed: Raw,
    retain_graph: bool,
    wanted: Option<&FxHashSet<u64>>,
    targets: Option<&FxHashSet<u64>>,
    mut buffered: Option<&mut Buffered>,
    mut finish: impl FnMut(&Arc<Node>, Raw) -> Result<()>,
) -> Result<()> {
    let _no_grad = no_grad();
    let mut table: FxHashMap<u64, Pending> = FxHashMap::default();
    let mut heap = BinaryHeap::new();
    table.insert(root.id(), Pending::new(seed, /* owned */ false));
    heap.push(Youngest(root.clone()));
    let mut queued: FxHashSet<u64> = std::iter::once(root.id()).collect();
    let mut interrupt = Interrupt::new();
    while let Some(Youngest(node)) = heap.pop() {
        let Some(mut pending) = table.remove(&node.id()) else { continue };
        pending.complete()?;
        interrupt.step(pending.sum.elem_count())?;
        let is_target = targets.is_some_and(|t| t.contains(&node.id()));
        if is_target || (targets.is_none() && node.leaf().is_some()) {
            finish(&node, pending.sum.clone())?;
        }
        let Kind::Op(state) = &node.kind else { continue };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(backward) = state.as_ref() else {
            return Err(Error::autograd(
                "backward",
                format!(
                    "the graph through {} was already differentiated and its saved values are freed; \
                     pass retain_graph=True to the first backward to differentiate it again",
                    node.name
                ),
            ));
        };
        let mut context = BackwardContext {
            node: &node,
            grad: pending.sum,
            wanted,
            table: &mut table,
            buffered: buffered.as_deref_mut(),
            reached: SmallVec::new(),
        };
        backward.backward(&mut context)?;
        let reached = std::mem::take(&mut context.reached);
        drop(context);
        if !retain_graph {
            *state = None;
        }
        drop(state);
        if let Some(buffered) = buffered.as_deref_mut() {
            buffered.run_if_large()?;
        }
        for index in reached {
            if let Some(input) = node.inputs[index].as_ref().filter(|i| queued.insert(i.id())) {
                heap.push(Youngest(input.clone()));
            }
        }
    }
    Ok(())
}

fn seed_for(op: &'static str, loss: &Tensor, gradient: Option<&Tensor>) -> Result<(Arc<Node>, Raw)> {
    let Some(node) = &loss.node else {
        return Err(Error::autograd(
            op,
            "the tensor does not depend on a variable, so there is nothing to differentiate; \
             was it computed under no_grad() or from detached tensors?",
        ));
    };
    let seed = match gradient {
        Some(g) if g.dims() != loss.dims() => {
            return Err(Error::shape(
                op,
                format!("the gradient has shape {:?}, the tensor {:?}; they must be equal", g.dims(), loss.dims()),
            ));
        }
        Some(g) if g.dtype() != loss.dtype() => compute::cast(&g.raw, loss.dtype())?,
        // A copy, because the seed may become the gradient of a variable. If `g` has the storage of a variable, a later
        // change of that variable must not change the gradient.
        Some(g) if g.version.is_some() => raw::own_copy(&g.raw)?,
        Some(g) => g.raw.clone(),
        None if loss.elem_count() == 1 => ones_like(&loss.raw)?,
        None => {
            return Err(Error::shape(
                op,
                format!(
                    "a tensor of shape {:?} needs a gradient argument; only a tensor of one element needs none",
                    loss.dims()
                ),
            ));
        }
    };
    Ok((node.clone(), seed))
}

fn ones_like(raw: &Raw) -> Result<Raw> {
    if !raw.device().is_cpu() {
        return compute::full(1.0, raw.dims(), raw.dtype(), raw.device());
    }
    Ok(match raw.dtype() {
        DType::F32 => Raw::full(1f32, raw.shape(), raw.device())?,
        dtype => Raw::ones(raw.shape(), dtype, raw.device())?,
    })
}

impl Tensor {
    /// Differentiate this tensor of one element with respect to every variable it depends on. The gradients are added
    /// to [`Var::grad`](crate::Var::grad). The values that an operation has saved are freed once its inputs' gradients
    /// are computed.
    ///
    /// # Errors
    /// [`Error::Shape`] if the tensor does not have one element, [`Error::Autograd`] if it does not depend on a
    /// variable, the graph was differentiated before, or a variable was changed in place after its values were saved.
    pub fn backward(&self) -> Result<GradStore> {
        self.backward_with(None, /* retain_graph */ false)
    }

    /// [`backward`](Tensor::backward) of a tensor of any shape: `gradient`, of the same shape, is the gradient of the
    /// loss with respect to this tensor. The graph is kept for another backward pass if `retain_graph`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `gradient` has another shape than the tensor, or if it is `None` and the tensor does not
    /// have one element; [`Error::Autograd`] as [`backward`](Tensor::backward).
    pub fn backward_with(&self, gradient: Option<&Self>, retain_graph: bool) -> Result<GradStore> {
        let (root, seed) = seed_for("backward", self, gradient)?;
        let (mut reached, mut buffered) = (FxHashSet::default(), Buffered::default());
        let (wanted, targets) = (None, None);
        let outcome = differentiate(&root, seed, retain_graph, wanted, targets, Some(&mut buffered), |node, grad| {
            reached.insert(node.id());
            node.leaf().map_or(Ok(()), |leaf| leaf.accumulate(grad))
        });
        // The waiting products run even if the pass failed, because their variables already count as having a gradient.
        let run = buffered.run();
        outcome?;
        run?;
        reached.extend(buffered.variables);
        Ok(GradStore { reached })
    }
}

/// The gradients of `loss` with respect to `inputs` (variables or any tensors on the tape).
/// [`Var::grad`](crate::Var::grad) does not change. An input that the loss does not depend on gets `None`. `gradient`
/// and `retain_graph` are those of [`Tensor::backward_with`].
///
/// # Errors
/// As [`Tensor::backward_with`], and [`Error::Autograd`] if an input is not on the tape.
pub fn grad(
    loss: &Tensor,
    inputs: &[&Tensor],
    gradient: Option<&Tensor>,
    retain_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    let (root, seed) = seed_for("grad", loss, gradient)?;
    let mut targets: FxHashSet<u64> = FxHashSet::default();
    for (index, input) in inputs.iter().enumerate() {
        let Some(node) = &input.node else {
            return Err(Error::autograd("grad", format!("input {index} needs no gradient; make it a Var")));
        };
        targets.insert(node.id());
    }
    let wanted = on_paths_to(&root, &targets);
    let mut grads: FxHashMap<u64, Raw> = FxHashMap::default();
    differentiate(&root, seed, retain_graph, Some(&wanted), Some(&targets), None, |node, grad| {
        grads.insert(node.id(), grad);
        Ok(())
    })?;
    inputs
        .iter()
        .map(|input| {
            let grad = input.node.as_ref().and_then(|n| grads.get(&n.id()));
            grad.map(|raw| Ok(Tensor::constant(compute::contiguous(&compute::cast(raw, input.dtype())?)?))).transpose()
        })
        .collect()
}

/// The ids of the nodes on a path from `root` to a target, along the inputs of nodes: only these get gradients.
fn on_paths_to(root: &Arc<Node>, targets: &FxHashSet<u64>) -> FxHashSet<u64> {
    let mut nodes: Vec<&Arc<Node>> = Vec::new();
    let mut seen: FxHashSet<u64> = FxHashSet::default();
    let mut stack = vec![root];
    while let Some(node) = stack.pop() {
        if seen.insert(node.id()) {
            nodes.push(node);
            stack.extend(node.inputs.iter().flatten());
        }
    }
    nodes.sort_unstable_by_key(|n| n.id()); // the inputs of a node before the node
    let mut wanted = FxHashSet::default();
    for node in nodes {
        if targets.contains(&node.id()) || node.inputs.iter().flatten().any(|i| wanted.contains(&i.id())) {
            wanted.insert(node.id());
        }
    }
    wanted
}
