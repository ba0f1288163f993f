//! The CPU form of `linear_cross_entropy` and of `linear_log_probs`, which compute the logits of a language model's
//! head and the losses in chunks of rows. It computes only the rows whose target is not ignored.

use super::super::IGNORE_INDEX;
use super::super::cross_entropy::cpu::{Targets, gradient, losses, read_targets};
use super::{Head, OP, accumulator};
use crate::ops::index::{select_backward, select_raw};
use crate::raw::{Raw, from_vec, to_f64_vec};
use crate::{Result, Tensor};

/// The label smoothing of the losses: none.
const SMOOTHING: f64 = 0.0;

/// The sum of the losses, each multiplied by its element of `loss_weights` if they are given, and the gradients of the
/// sum with respect to the head's states and weight.
pub(super) fn sum(head: &Head<'_>, targets: &Tensor, loss_weights: Option<&Raw>) -> Result<(Raw, [Option<Raw>; 2])> {
    let labelled = Labelled::new(OP, head, targets)?;
    let all_loss_weights = loss_weights.map(to_f64_vec).transpose()?;
    let loss_weight = |&index: &usize| all_loss_weights.as_ref().map_or(1.0, |all| all[index]);
    let labelled_weights: Vec<f64> = labelled.indices.iter().map(loss_weight).collect();
    let mut sum = 0.0;
    // `run` calls the closure for one chunk after another; `rows` is the chunk's range among the rows in `labelled`.
    // The closure returns a value that `run` collects, here `()`, and the gradient of the chunk's logits. From this
    // gradient, `run` computes those of the states and the weight.
    let (_, gradients) = labelled.head(head).run(|logits, rows| {
        let targets: Targets = labelled.targets[rows.clone()].to_vec();
        let (losses, lse) = losses(&logits, &targets, SMOOTHING)?;
        let weights = &labelled_weights[rows];
        sum += to_f64_vec(&losses)?.iter().zip(weights).map(|(loss, weight)| loss * weight).sum::<f64>();
        let gradient = head.wants_gradients().then(|| gradient(&logits, &lse, &targets, weights, SMOOTHING));
        Ok(((), gradient.transpose()?))
    })?;
    let sum = from_vec(vec![sum], ()).to_dtype(accumulator(head.h.dtype()))?;
    Ok((sum, labelled.scatter(OP, head, gradients)?))
}

/// The rows whose target is not ignored, in ascending order.
pub(super) struct Labelled {
    /// The indices of these rows among all rows.
    pub indices: Vec<usize>,
    /// The targets of these rows.
    pub targets: Targets,
    /// The hidden states of these rows; `None` if these are all rows.
    states: Option<Raw>,
    /// `indices` as a tensor.
    index_tensor: Raw,
}

impl Labelled {
    pub fn new(op: &'static str, head: &Head<'_>, targets: &Tensor) -> Result<Self> {
        // The states `head.h` are (N, D); `head.weight` is (V, D), with a row for each id of the vocabulary.
        let targets = read_targets(op, targets, head.weight.dims()[0], IGNORE_INDEX)?;
        let indices: Vec<usize> = (0..targets.len()).filter(|&row| targets[row].is_some()).collect();
        let none_ignored = indices.len() == targets.len();
        let index_tensor = from_vec(indices.iter().map(|&index| index as i64).collect::<Vec<_>>(), indices.len());
        let states = if none_ignored {
            None
        } else {
            Some(select_raw(op, head.h, &index_tensor, /* dim */ 0)?)
        };
        Ok(Self { targets: targets.into_iter().filter(Option::is_some).collect(), indices, states, index_tensor })
    }

    /// `head` with only the states of these rows.
    pub fn head<'a>(&'a self, head: &Head<'a>) -> Head<'a> {
        Head { h: self.states.as_ref().unwrap_or(head.h), ..*head }
    }

    /// Expands the gradient of the states from these rows to all rows of `head`, with zeros in the ignored rows.
    /// Returns the gradient of the weight unchanged.
    pub fn scatter(
        &self,
        op: &'static str,
        head: &Head<'_>,
        [of_states, of_weight]: [Option<Raw>; 2],
    ) -> Result<[Option<Raw>; 2]> {
        let of_states = match of_states {
            Some(of_labelled) if self.states.is_some() => {
                Some(select_backward(op, &of_labelled, &self.index_tensor, /* dim */ 0, head.h.dims()[0])?)
            }
            of_all => of_all,
        };
        Ok([of_states, of_weight])
    }
}

/// The logarithm of the probability of each row's target; 0 for a row whose target is ignored.
pub(super) fn log_probs(op: &'static str, head: &Head<'_>, targets: &Tensor) -> Result<Raw> {
    let labelled = Labelled::new(op, head, targets)?;
    let mut values = vec![0.0; head.h.dims()[0]];
    // The closure returns nothing to collect and no gradient of the logits.
    labelled.head(head).run(|logits, rows| {
        let (losses, _) = losses(&logits, &labelled.targets[rows.clone()].to_vec(), SMOOTHING)?;
        for (&index, loss) in labelled.indices[rows].iter().zip(to_f64_vec(&losses)?) {
            values[index] = -loss;
        }
        Ok(((), None))
    })?;
    let count = values.len();
    Ok(from_vec(values, count).to_dtype(accumulator(head.h.dtype()))?)
}

/// The gradients with respect to the states and the weight; `grad` is the gradient with respect to the result of
/// [`log_probs`].
pub(super) fn log_probs_backward(
    op: &'static str,
    head: &Head<'_>,
    targets: &Tensor,
    grad: &Raw,
) -> Result<[Option<Raw>; 2]> {
    let labelled = Labelled::new(op, head, targets)?;
    let grad = to_f64_vec(grad)?;
    // `log_probs` returns the negative of each row's loss, so the gradient changes its sign.
    let scales: Vec<f64> = labelled.indices.iter().map(|&index| -grad[index]).collect();
    let (_, gradients) = labelled.head(head).run(|logits, rows| {
        let targets: Targets = labelled.targets[rows.clone()].to_vec();
        let (_, lse) = losses(&logits, &targets, SMOOTHING)?;
        Ok(((), Some(gradient(&logits, &lse, &targets, &scales[rows], SMOOTHING)?)))
    })?;
    labelled.scatter(op, head, gradients)
}
