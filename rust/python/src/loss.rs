//! The losses of `trainable_candle.nn.functional`. Functions that torch also has use torch's argument names.
//!
//! Each function passes to `compute` a number of elements that tells how long the work takes: `compute` releases the
//! GIL if it is large.

use pyo3::prelude::*;
use tc::ops::loss::{self, Reduction};
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::arguments::Integer;
use crate::call::compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Compute the squared error (input - target)²; by default, its mean over all elements.
///
/// ```python
/// loss = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.mse_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: a tensor of any shape.
///     target: of the input's shape and dtype.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean"))]
pub fn mse_loss(py: Python<'_>, input: &Tensor, target: &Tensor, reduction: &str) -> Result<Tensor> {
    let reduction = Reduction::parse("mse_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::mse_loss(&input.0, &target.0, reduction)).map(Tensor)
}

/// Compute the absolute error |input - target|; by default, its mean over all elements.
///
/// ```python
/// loss = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: a tensor of any shape.
///     target: of the input's shape and dtype.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if the reduction is unknown.
#[pyfunction]
#[pyo3(signature = (input, target, reduction="mean"))]
pub fn l1_loss(py: Python<'_>, input: &Tensor, target: &Tensor, reduction: &str) -> Result<Tensor> {
    let reduction = Reduction::parse("l1_loss", reduction)?;
    compute(py, input.0.elem_count(), || loss::l1_loss(&input.0, &target.0, reduction)).map(Tensor)
}

/// Compute the Huber loss (Huber 1964) of the differences d = input - target: d² / 2 if |d| <= delta, otherwise
/// delta * (|d| - delta / 2). By default, the result is the mean over all elements.
///
/// ```python
/// loss = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.huber_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: a tensor of any shape.
///     target: of the input's shape and dtype.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///     delta: the magnitude of the difference from which the loss is linear, above 0.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
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

/// Compute torch's `smooth_l1_loss` (Girshick 2015, arXiv:1504.08083) of the differences d = input - target:
/// d² / (2 * beta) if |d| < beta, otherwise |d| - beta / 2. This is the Huber loss with the delta `beta`, divided by
/// `beta`. By default, the result is the mean over all elements.
///
/// ```python
/// loss = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]))
/// each = F.smooth_l1_loss(tc.tensor([0.0, 2.0]), tc.tensor([0.0, 0.0]), reduction="none")
/// assert loss.item() == each.mean().item()
/// ```
///
/// Args:
///     input: a tensor of any shape.
///     target: of the input's shape and dtype.
///     reduction: "mean", "sum", or "none" for the losses of the elements.
///     beta: the magnitude of the difference from which the loss is linear, at least 0; with 0 the loss is the absolute
///         error.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
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

/// Compute the cross-entropy of logits and class ids. Unlike in torch, the classes are always the last dimension of the
/// logits.
///
/// ```python
/// loss = F.cross_entropy(tc.randn(4, 10), tc.tensor([1, 2, 3, -100]), label_smoothing=0.1)
/// ```
///
/// Args:
///     input: logits, (..., classes): one row of logits for each target.
///     target: class ids, (...), i64 or u32.
///     ignore_index: rows with this target have the loss 0 and no gradient.
///     reduction: "mean" (over the rows that are not ignored; NaN if all are), "sum", or "none" for the losses of the
///         rows.
///     label_smoothing: the fraction of each target's probability that is spread evenly over all classes, in [0, 1].
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
///         device raises this error.
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

/// Compute the sum of the cross-entropies of the logits `input @ weight.T` and the class ids `target`: a scalar in f32
/// (f64 for f64 input). The forward pass computes the logits of some rows at a time, so that the matrix of all logits
/// never exists. It also computes the gradients, which the backward pass only multiplies by a number.
///
/// ```python
/// states, head, ids = tc.randn(3, 8), tc.randn(100, 8), tc.tensor([5, 7, -100])
/// loss = F.linear_cross_entropy(states, head, ids)
/// assert tc.allclose(loss, F.cross_entropy(states @ head.T, ids, reduction="sum"), rtol=1e-4)
/// ```
///
/// Args:
///     input: N rows of D features, (N, D).
///     weight: (classes, D), in the dtype of the input. The gradient of a frozen weight is not computed.
///     target: class ids, (N,), i64 or u32; rows with -100 are ignored.
///     weights: the factors by which the rows' losses are multiplied, (N,), f32 or f64. They get no gradient. Default:
///         all 1.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
///         device raises this error.
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

/// Compute, for each row of `input`, the logarithm of the probability of its class id under the softmax of
/// `input @ weight.T`: (N,), in f32 (f64 for f64 input). The logits are computed for some rows at a time, and again in
/// the backward pass.
///
/// ```python
/// states, head = tc.randn(3, 8), tc.randn(100, 8)
/// assert F.linear_log_probs(states, head, tc.tensor([5, 7, -100])).shape == (3,)
/// ```
///
/// Args:
///     input: N rows of D features, (N, D).
///     weight: (classes, D), in the dtype of the input.
///     target: class ids, (N,), i64 or u32; rows with -100 give 0.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     IndexOutOfRangeError: if a target is not a class. On CUDA, the next call that reads a value or waits for the
///         device raises this error.
#[pyfunction]
pub fn linear_log_probs(py: Python<'_>, input: &Tensor, weight: &Tensor, target: &Tensor) -> Result<Tensor> {
    compute(py, weight.0.elem_count(), || loss::linear_log_probs(&input.0, &weight.0, &target.0)).map(Tensor)
}
