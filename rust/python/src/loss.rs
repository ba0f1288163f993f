//! The losses of `trainable_candle.nn.functional`. Argument names are torch's.

use pyo3::prelude::*;
use tc::ops::loss::{self, Reduction};
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Compute the mean squared error.
///
/// ```python
/// loss = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: any shape.
///     target: the same shape.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean"))]
pub fn mse_loss(py: Python<'_>, input: &Tensor, target: &Tensor, reduction: &str) -> Result<Tensor> {
    let reduction = Reduction::parse("mse_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::mse_loss(&input.0, &target.0, reduction)).map(Tensor)
}

/// Compute the mean absolute error.
///
/// ```python
/// loss = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: any shape.
///     target: the same shape.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean"))]
pub fn l1_loss(py: Python<'_>, input: &Tensor, target: &Tensor, reduction: &str) -> Result<Tensor> {
    let reduction = Reduction::parse("l1_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::l1_loss(&input.0, &target.0, reduction)).map(Tensor)
}

/// Compute the Huber loss (Huber 1964) of a difference d: d² / 2 if |d| <= delta, otherwise delta * (|d| - delta / 2).
///
/// ```python
/// loss = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: any shape.
///     target: the same shape.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///     delta: the difference from which the loss is linear, above 0.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown or `delta` is not above 0.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean", delta=Argument::of(1.0)))]
pub fn huber_loss(
    py: Python<'_>,
    input: &Tensor,
    target: &Tensor,
    reduction: &str,
    delta: Argument<f64>,
) -> Result<Tensor> {
    let delta = delta.get("huber_loss", "delta")?;
    let reduction = Reduction::parse("huber_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::huber_loss(&input.0, &target.0, delta, reduction)).map(Tensor)
}

/// Compute torch's `smooth_l1_loss` (Girshick 2015, arXiv:1504.08083) of a difference d: d² / (2 * beta) if |d| < beta,
/// otherwise |d| - beta / 2. It is the Huber loss with the delta `beta`, divided by `beta`.
///
/// ```python
/// loss = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: any shape.
///     target: the same shape.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///     beta: the difference from which the loss is linear, at least 0; with 0 the loss is the absolute error.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown or `beta` is negative.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean", beta=Argument::of(1.0)))]
pub fn smooth_l1_loss(
    py: Python<'_>,
    input: &Tensor,
    target: &Tensor,
    reduction: &str,
    beta: Argument<f64>,
) -> Result<Tensor> {
    let beta = beta.get("smooth_l1_loss", "beta")?;
    let reduction = Reduction::parse("smooth_l1_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::smooth_l1_loss(&input.0, &target.0, beta, reduction)).map(Tensor)
}

/// Compute the cross-entropy of logits and class ids.
///
/// ```python
/// loss = F.cross_entropy(tc.randn(4, 10), tc.tensor([1, 2, 3, -100]), label_smoothing=0.1)
/// ```
///
/// Args:
///     input: (..., classes) logits.
///     target: (...) class ids, i64 or u32.
///     ignore_index: rows with this target have no loss and no gradient.
///     reduction: "mean" (over the rows that are not ignored; NaN if all are), "sum", or "none" for the losses of the rows.
///     label_smoothing: the fraction of each target's probability that is spread evenly over all classes, in [0, 1].
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class.
///     ArgumentError: if the reduction is unknown or `label_smoothing` is out of range.
#[pyfunction]
#[pyo3(signature = (input, target, *, ignore_index=Integer::of(-100), reduction="mean", label_smoothing=Argument::of(0.0)))]
pub fn cross_entropy(
    py: Python<'_>,
    input: &Tensor,
    target: &Tensor,
    ignore_index: Integer,
    reduction: &str,
    label_smoothing: Argument<f64>,
) -> Result<Tensor> {
    let ignore_index = ignore_index.signed("cross_entropy", "ignore_index")?;
    let label_smoothing = label_smoothing.get("cross_entropy", "label_smoothing")?;
    let reduction = Reduction::parse("cross_entropy", reduction)?;
    compute(py, input.0.elem_count(), || {
        loss::cross_entropy(&input.0, &target.0, ignore_index, label_smoothing, reduction)
    })
    .map(Tensor)
}

/// Compute the sum of the cross-entropies of the logits `input @ weight.T` and class ids, a scalar in f32 (f64 for f64
/// input). The forward pass computes the logits of some rows at a time, without a matrix of all logits, and also
/// computes the gradients.
///
/// ```python
/// states, head, ids = tc.randn(3, 8), tc.randn(100, 8), tc.tensor([5, 7, -100])
/// found = F.linear_cross_entropy(states, head, ids)
/// assert tc.allclose(found, F.cross_entropy(states @ head.T, ids, reduction="sum"), rtol=1e-4)
/// ```
///
/// Args:
///     input: (N, D) states.
///     weight: (classes, D), in the dtype of the states. The gradient of a frozen weight is not computed.
///     target: (N) class ids, i64 or u32; rows with -100 are ignored.
///     weights: (N) f32, the factors by which the rows' losses are multiplied. They get no gradient. Default: all 1.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class.
///     NoBackwardError: if `weights` needs a gradient.
#[pyfunction]
#[pyo3(signature = (input, weight, target, weights=None))]
pub fn linear_cross_entropy(
    py: Python<'_>,
    input: &Tensor,
    weight: &Tensor,
    target: &Tensor,
    weights: Option<&Tensor>,
) -> Result<Tensor> {
    let weights = weights.map(|weights| &weights.0);
    compute(py, weight.0.elem_count(), || loss::linear_cross_entropy(&input.0, &weight.0, &target.0, weights))
        .map(Tensor)
}

/// Compute, for each row, the logarithm of the probability of its class id under the softmax of `input @ weight.T`:
/// (N), in f32 (f64 for f64 input). The logits are computed for some rows at a time, and again in the backward pass.
///
/// ```python
/// states, head = tc.randn(3, 8), tc.randn(100, 8)
/// assert F.linear_log_probs(states, head, tc.tensor([5, 7, -100])).shape == (3,)
/// ```
///
/// Args:
///     input: (N, D) states.
///     weight: (classes, D), in the dtype of the states.
///     target: (N) class ids, i64 or u32; rows with -100 give 0.
///
/// Raises:
///     ShapeError, DTypeError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class.
#[pyfunction]
pub fn linear_log_probs(py: Python<'_>, input: &Tensor, weight: &Tensor, target: &Tensor) -> Result<Tensor> {
    compute(py, weight.0.elem_count(), || loss::linear_log_probs(&input.0, &weight.0, &target.0)).map(Tensor)
}
