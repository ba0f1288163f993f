//! Puts operations on the tape.

use std::sync::Arc;

use smallvec::SmallVec;

use super::mode::flags;
use super::node::{Backward, Inputs, Node};
use super::saved::Saved;
use crate::checkpoint;
use crate::raw::Raw;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// The cost of recomputing an operation. It decides whether a selective checkpoint keeps the operation's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// Bound by memory traffic: norms, activations, sums. A selective checkpoint recomputes the result.
    Cheap,
    /// Bound by arithmetic: matrix products, convolutions, attention. A selective checkpoint keeps the result.
    Expensive,
}

/// The name and cost class of an operation.
#[derive(Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// The name in errors and in the registry.
    pub name: &'static str,
    /// The cost class.
    pub cost: Cost,
}

impl OpInfo {
    /// A cheap operation.
    pub const fn cheap(name: &'static str) -> Self {
        Self { name, cost: Cost::Cheap }
    }

    /// An expensive operation.
    pub const fn expensive(name: &'static str) -> Self {
        Self { name, cost: Cost::Expensive }
    }
}

/// Auxiliary results that only the backward pass reads (statistics, log-sum-exp, x Aᵀ).
pub(crate) type Aux = SmallVec<[Raw; 2]>;

/// Keeps values for an operation's backward pass: `save` keeps activations, and `hold` keeps parameters.
pub struct Saver<'a> {
    /// The operation's inputs.
    inputs: &'a [&'a Tensor],
    /// Whether the operation runs inside the function of a checkpoint, in its first run or in a recomputation.
    in_checkpoint: bool,
}

impl Saver<'_> {
    /// Whether input `index` needs a gradient.
    pub fn needs(&self, index: usize) -> bool {
        self.inputs[index].node.is_some()
    }

    /// Keep an input that the backward pass reads.
    pub fn save(&mut self, tensor: &Tensor) -> Saved {
        // Inside a checkpoint, the tape keeps a slot of the checkpoint, which recomputes the value. Otherwise, if
        // `Tensor::recomputed` has marked the tensor, the tape keeps the tensor's node, which computes the value again
        // from what the node saved. In all other cases, the tape keeps the value.
        let slot = if self.in_checkpoint { checkpoint::save(&tensor.raw) } else { None };
        slot.or_else(|| Saved::again(tensor)).unwrap_or_else(|| Saved::keep(tensor))
    }

    /// Keep a result or an auxiliary value that the backward pass reads.
    pub fn save_raw(&mut self, raw: &Raw) -> Saved {
        if self.in_checkpoint {
            checkpoint::save(raw).unwrap_or_else(|| Saved::keep_raw(raw))
        } else {
            Saved::keep_raw(raw)
        }
    }

    /// Keep a parameter (a weight, a bias, a norm's scale). If the parameter is changed in place before the backward
    /// pass reads it, the backward pass returns an error. The parameter does not count as saved memory. A parameter
    /// that is the result of operations is [saved](Self::save) like an activation.
    pub fn hold(&mut self, tensor: &Tensor) -> Saved {
        if tensor.is_leaf() { Saved::hold(tensor) } else { self.save(tensor) }
    }
}

/// Run `forward`, which computes the result of `op`. If an input needs a gradient, call `backward` with the result;
/// `backward` returns the derivative, which goes on the tape in a new node.
pub fn record<B: Backward + 'static>(
    op: &'static OpInfo,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<Raw>,
    backward: impl FnOnce(&mut Saver<'_>, &Raw) -> B,
) -> Result<Tensor> {
    record_with_aux(op, inputs, || Ok((forward()?, Aux::new())), |saver, result, _| backward(saver, result))
}

/// [`record`] for an operation whose forward pass also computes auxiliary values for its backward pass.
pub fn record_with_aux<B: Backward + 'static>(
    op: &'static OpInfo,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<(Raw, Aux)>,
    backward: impl FnOnce(&mut Saver<'_>, &Raw, &[Raw]) -> B,
) -> Result<Tensor> {
    let mode = flags();
    let in_checkpoint = mode.recording();
    let (raw, aux) = if in_checkpoint { checkpoint::run(op, inputs, forward)? } else { forward()? };
    let needs_grad = mode.grad_enabled() && inputs.iter().any(|t| t.node.is_some());
    if !needs_grad {
        return Ok(Tensor::constant(raw));
    }
    let backward = backward(&mut Saver { inputs, in_checkpoint }, &raw, &aux);
    if in_checkpoint {
        // If this is a recomputation and all saved values exist now, an error ends the checkpoint's function here. The
        // checkpoint handles this error.
        checkpoint::stop_if_complete()?;
    }
    Ok(on_tape(op.name, inputs, raw, Box::new(backward)))
}

/// [`record`] for an operation whose result, `view`, shares the storage of `input`.
pub fn record_view<B: Backward + 'static>(
    op: &'static OpInfo,
    input: &Tensor,
    view: Raw,
    backward: impl FnOnce() -> B,
) -> Result<Tensor> {
    let mut result = match &input.node {
        Some(_) if flags().grad_enabled() => on_tape(op.name, &[input], view, Box::new(backward())),
        _ => Tensor::constant(view),
    };
    // A version counts a variable's changes in place. A view of the variable changes with it, so backward passes must
    // check the view against the same counter.
    result.version = input.version.clone();
    Ok(result)
}

/// Run an operation that has no derivative.
///
/// # Errors
/// [`Error::NoBackward`] if an input needs a gradient, unless the tape is off ([`no_grad`](super::no_grad)).
pub fn record_no_backward(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<Raw>,
) -> Result<Tensor> {
    if flags().grad_enabled() && inputs.iter().any(|t| t.node.is_some()) {
        return Err(Error::NoBackward { op });
    }
    // A checkpoint must know what its function reads, because variables that it reads must not change before the
    // recomputation. For operations with a derivative, `checkpoint::run` does this.
    checkpoint::reads(inputs);
    Ok(Tensor::constant(forward()?))
}

fn on_tape(name: &'static str, inputs: &[&Tensor], raw: Raw, backward: Box<dyn Backward>) -> Tensor {
    let inputs: Inputs = inputs.iter().map(|t| t.node.clone()).collect();
    Tensor { raw, node: Some(Arc::new(Node::op_node(name, inputs, backward))), version: None }
}
