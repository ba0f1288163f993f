//! The gradients of LoRA layers: `lora_backward` and `lora_backward_`.

use pyo3::prelude::*;
use tc::ops::lora;
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::call::{compute, detached};
use crate::error::Result;
use crate::tensor::Tensor;
use crate::var::Var;

/// Compute the gradients of `lora_down` and `lora_up`, the matrices in y = scale * (input @ lora_down.T) @ lora_up.T.
///
/// ```python
/// x, down, up = tc.randn(5, 8), tc.randn(2, 8), tc.randn(4, 2)
/// grad_down, grad_up = tc.lora_backward(tc.ones(5, 4), x, down, up, 0.5)
/// assert (grad_down.shape, grad_up.shape) == (down.shape, up.shape)
/// ```
///
/// Args:
///     grad_output: (..., out_features), the gradient with respect to y.
///     input: (..., in_features).
///     lora_down: (rank, in_features), in the dtype of `input`, or in f32 if `input` is f16 or bf16.
///     lora_up: (out_features, rank), in the dtype of `input`, or in f32 if `input` is f16 or bf16.
///     scale: the factor `scale` in the formula.
///
/// Returns:
///     (grad_down, grad_up), in the shapes and dtypes of `lora_down` and `lora_up`.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if the scale is not finite.
#[pyfunction]
pub fn lora_backward(
    py: Python<'_>,
    grad_output: &Tensor,
    input: &Tensor,
    lora_down: &Tensor,
    lora_up: &Tensor,
    scale: Argument<f64>,
) -> Result<(Tensor, Tensor)> {
    let scale = scale.get("lora_backward", "scale")?;
    // `compute` releases the GIL if the call takes as long as an operation over many elements.
    let elements = grad_output.0.elem_count().saturating_add(input.0.elem_count());
    let (down, up) =
        compute(py, elements, || lora::lora_backward(&grad_output.0, &input.0, &lora_down.0, &lora_up.0, scale))?;
    Ok((Tensor(down), Tensor(up)))
}

/// Compute `lora_backward` of many layers at once, and add the results to the `.grad` of the matrices. Gradients that
/// are in a flat buffer change in place. On a CUDA device, many matrix products run in one launch, without
/// synchronization.
///
/// ```python
/// x, down, up = tc.randn(5, 8), tc.Var(tc.randn(2, 8)), tc.Var(tc.randn(4, 2))
/// tc.lora_backward_([tc.ones(5, 4)], [x], [down], [up], 0.5)
/// assert down.grad.shape == down.shape
/// ```
///
/// Args:
///     grad_outputs: one tensor (..., out_features) for each layer.
///     inputs: one tensor (..., in_features) for each layer.
///     lora_downs: one variable (rank, in_features) for each layer.
///     lora_ups: one variable (out_features, rank) for each layer.
///     scale: the argument `scale` of `lora_backward`, the same for all layers.
///
/// Raises:
///     ArgumentError: if the lists have different lengths, or the scale is not finite.
///     ShapeError, DTypeError, DeviceError: if the operands of a layer do not fit together. No gradient changes in this
///         case.
#[pyfunction]
pub fn lora_backward_(
    py: Python<'_>,
    grad_outputs: Vec<PyRef<'_, Tensor>>,
    inputs: Vec<PyRef<'_, Tensor>>,
    lora_downs: Vec<PyRef<'_, Var>>,
    lora_ups: Vec<PyRef<'_, Var>>,
    scale: Argument<f64>,
) -> Result<()> {
    const OP: &str = "lora_backward_";
    let scale = scale.get(OP, "scale")?;
    let count = grad_outputs.len();
    let [xs, downs, ups] = [inputs.len(), lora_downs.len(), lora_ups.len()];
    if [xs, downs, ups] != [count; 3] {
        let message = format!(
            "found {count} grad_outputs, but {xs} inputs, {downs} lora_downs and {ups} lora_ups; expected equal numbers"
        );
        return Err(tc::Error::argument(OP, message).into());
    }
    let layers: Vec<lora::LoraLayer<'_>> = (0..count)
        .map(|i| lora::LoraLayer {
            grad_output: &grad_outputs[i].0,
            input: &inputs[i].0,
            down: &lora_downs[i].0,
            up: &lora_ups[i].0,
            scale,
        })
        .collect();
    // `detached` always releases the GIL.
    detached(py, || lora::lora_backward_(&layers))
}
