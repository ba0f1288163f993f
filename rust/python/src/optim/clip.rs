//! The Python function `clip_grad_norm_`, which clips gradients.

use pyo3::prelude::*;
use trainable_candle_core as tc;
use trainable_candle_nn::optim::{self, NormType};

use super::Variables;
use crate::argument::Argument;
use crate::call::detached;
use crate::error::Result;
use crate::tensor::Tensor;

/// Scale the gradients of `parameters` so that the norm of all these gradients together is at most `max_norm`, as
/// `torch.nn.utils.clip_grad_norm_` does.
///
/// ```python
/// loss.backward()
/// norm = tc.optim.clip_grad_norm_(model.parameters(), 1.0)
/// optimizer.step()
/// ```
///
/// Args:
///     parameters: the variables; those without a gradient are ignored.
///     max_norm: the largest norm after scaling, at least 0. If it is infinite, finite gradients do not change.
///     norm_type: 2 for the root of the sum of squares, infinity for the largest magnitude of an element.
///     error_if_nonfinite: whether a non-finite norm raises an error instead of making the gradients zero or NaN. On a
///         CUDA device, this check waits for all pending work of the device.
///
/// Returns:
///     The norm before scaling: a scalar in f64 on the device of the gradients. On a CUDA device, reading the scalar's
///     value waits for all pending work of the device.
///
/// Raises:
///     ArgumentError: if `max_norm` or `norm_type` is out of range, or `parameters` is a single tensor or has an item
///         that is not a Var.
///     DeviceError: if the gradients are on different devices.
///     NonFiniteError: if `error_if_nonfinite` is True and the norm is non-finite. In this case the gradients do not
///         change.
#[pyfunction]
#[pyo3(signature = (parameters, max_norm, norm_type=Argument::of(2.0), error_if_nonfinite=false))]
pub fn clip_grad_norm_(
    py: Python<'_>,
    parameters: Variables,
    max_norm: Argument<f64>,
    norm_type: Argument<f64>,
    error_if_nonfinite: bool,
) -> Result<Tensor> {
    const OP: &str = "clip_grad_norm_";
    let (max_norm, norm_type) = (max_norm.get(OP, "max_norm")?, norm_type.get(OP, "norm_type")?);
    let norm_type = if norm_type == 2.0 {
        NormType::L2
    } else if norm_type == f64::INFINITY {
        NormType::Inf
    } else {
        return Err(tc::Error::argument(OP, format!("found norm_type {norm_type}, expected 2 or infinity")).into());
    };
    // `detached` releases the GIL.
    detached(py, || optim::clip_grad_norm_(&parameters.0, max_norm, norm_type, error_if_nonfinite)).map(Tensor)
}
