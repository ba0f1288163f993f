//! The CUDA form of a language model's head h Wᵀ with its loss, computed for a chunk of rows at a time: cuBLAS and
//! `kernels/cross_entropy.cu`. The host does not read the targets, so it cannot leave out the rows whose target is
//! ignored.

use super::super::IGNORE_INDEX;
use super::super::cross_entropy::cuda::{GradientFactors, Targets, losses, write_gradient};
use super::{Head, OP, accumulator};
use crate::compute::{self, cast, contiguous};
use crate::cpu::Mul;
use crate::raw::Raw;
use crate::{Result, Tensor};

/// The sum of the rows' losses, each multiplied by its entry of `weights (N)`, and the sum's gradients with respect to
/// the states and the weight of the head.
pub(super) fn sum(head: &Head<'_>, targets: &Tensor, weights: Option<&Raw>) -> Result<(Raw, [Option<Raw>; 2])> {
    let sum_dtype = accumulator(head.h.dtype());
    let weights = weights.map(|weights| contiguous(&cast(weights, sum_dtype)?)).transpose()?;
    let (parts, gradients) = run(OP, head, targets, weights.as_ref(), head.wants_gradients())?;
    let losses = joined(head, &parts)?;
    let weighted = weights.map_or_else(|| Ok(losses.clone()), |weights| compute::binary(&losses, &weights, Mul))?;
    Ok((compute::sum(&weighted, &[0], /* keepdim */ false)?, gradients))
}

/// The logarithm of the probability of each row's target; 0 for a row whose target is ignored.
pub(super) fn log_probs(op: &'static str, head: &Head<'_>, targets: &Tensor) -> Result<Raw> {
    let with_gradients = false;
    let (parts, _) = run(op, head, targets, /* weights */ None, with_gradients)?;
    let losses = joined(head, &parts)?;
    compute::scale_in_place(&losses, -1.0)?;
    Ok(losses)
}

/// The gradients with respect to the states and the weight; `grad` is the gradient with respect to the result of
/// [`log_probs`].
pub(super) fn log_probs_backward(
    op: &'static str,
    head: &Head<'_>,
    targets: &Tensor,
    grad: &Raw,
) -> Result<[Option<Raw>; 2]> {
    // The loss of a row is the negative of its result.
    let weights = compute::copy(&cast(grad, accumulator(head.h.dtype()))?)?;
    compute::scale_in_place(&weights, -1.0)?;
    let with_gradients = true;
    Ok(run(op, head, targets, Some(&weights), with_gradients)?.1)
}

/// Returns the losses of each chunk and, if `with_gradients`, the gradients of states and weight for the sum of all
/// losses. In this sum, the loss of row i is multiplied by `weights[i]`, if `weights (N)` is given.
fn run(
    op: &'static str,
    head: &Head<'_>,
    targets: &Tensor,
    weights: Option<&Raw>,
    with_gradients: bool,
) -> Result<(Vec<Raw>, [Option<Raw>; 2])> {
    let ids = contiguous(targets.raw())?;
    // For each chunk, `head.run` calls this closure with the logits and the range of rows. The closure returns the
    // losses and, if wanted, the gradient of the logits, from which `head.run` computes those of states and weight.
    head.run(|logits, rows| {
        let (start, length) = (rows.start, rows.len());
        let targets = Targets::new(op, &ids.narrow(0, start, length)?, IGNORE_INDEX)?;
        let smoothing = 0.0;
        let (losses, lse) = losses(op, &logits, &targets, smoothing)?;
        if !with_gradients {
            return Ok((losses, None));
        }
        let weights = weights.map(|weights| weights.narrow(0, start, length)).transpose()?;
        let weights = weights.as_ref();
        // The losses are summed, so a row's gradient has no factor but its weight.
        let factors = GradientFactors { grad: None, of_rows: false, divisor: None, weights, smoothing };
        // The gradient overwrites the logits.
        write_gradient(op, &logits, &lse, &targets, &logits, &factors)?;
        Ok((losses, Some(logits)))
    })
}

/// The losses of all rows as one vector; `parts` has those of each chunk.
fn joined(head: &Head<'_>, parts: &[Raw]) -> Result<Raw> {
    match parts {
        [] => compute::zeros(&[0], accumulator(head.h.dtype()), head.h.device()),
        [one] => Ok(one.clone()),
        several => compute::cat(&several.iter().collect::<Vec<_>>(), 0),
    }
}
