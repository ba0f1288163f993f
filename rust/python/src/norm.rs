//! The normalisations of `trainable_candle.nn.functional`. Functions that torch also has use torch's argument names and
//! layouts.

use pyo3::prelude::*;
use tc::ops::norm as norms;
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::arguments::{Integer, Shape};
use crate::call::compute;
use crate::error::Result;
use crate::functional::{inner, with_channels_last};
use crate::tensor::Tensor;

/// The number of dimensions in `normalized_shape`, after a check that these are the trailing dimensions of `input`.
///
/// # Errors
/// `ShapeError` if `normalized_shape` is empty, has a negative size, or is not the end of the input's shape.
fn trailing_dims(op: &'static str, input: &tc::Tensor, normalized_shape: &Shape) -> Result<usize> {
    let sizes = normalized_shape.sizes(op)?;
    if sizes.is_empty() {
        return Err(tc::Error::shape(op, "normalized_shape is empty, expected at least one dimension").into());
    }
    if input.dims().ends_with(&sizes) {
        return Ok(sizes.len());
    }
    Err(tc::Error::shape(
        op,
        format!("the input has shape {:?}, which does not end in normalized_shape {sizes:?}", input.dims()),
    )
    .into())
}

/// Apply layer normalisation (Ba et al. 2016, arXiv:1607.06450) over the trailing dimensions `normalized_shape`.
///
/// ```python
/// y = F.layer_norm(tc.randn(2, 8), 8, weight=tc.ones(8))
/// assert y.shape == (2, 8)
/// ```
///
/// Args:
///     input: (..., *normalized_shape).
///     normalized_shape: the sizes of the trailing dimensions, or the size of the last dimension.
///     weight: scale, of shape `normalized_shape`.
///     bias: shift, of shape `normalized_shape`.
///     eps: added to the variance.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `eps` is negative or not finite.
#[pyfunction]
#[pyo3(signature = (input, normalized_shape, weight=None, bias=None, eps=Argument::of(1e-5)))]
pub fn layer_norm(
    py: Python<'_>,
    input: &Tensor,
    normalized_shape: Shape,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: Argument<f64>,
) -> Result<Tensor> {
    let eps = eps.get("layer_norm", "eps")?;
    let dims = trailing_dims("layer_norm", &input.0, &normalized_shape)?;
    // Here and below, `compute` releases the GIL if the input has many elements.
    compute(py, input.0.elem_count(), || norms::layer_norm(&input.0, dims, inner(weight), inner(bias), eps)).map(Tensor)
}

/// Compute input + residual and the `layer_norm` of this sum. A pre-norm transformer block needs the sum for its
/// residual connection and the norm for its next layer. On CUDA, one kernel computes both.
///
/// ```python
/// total, normed = F.add_layer_norm(tc.randn(2, 8), tc.randn(2, 8), 8)
/// ```
///
/// Args:
///     input: (..., *normalized_shape).
///     residual: of the input's shape and dtype.
///     normalized_shape: the sizes of the trailing dimensions, or the size of the last dimension.
///     weight: scale, of shape `normalized_shape`.
///     bias: shift, of shape `normalized_shape`.
///     eps: added to the variance.
///
/// Returns:
///     The sum and the normalised sum, both of the input's shape and dtype. The sum is rounded to this dtype before it
///     is normalised.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `eps` is negative or not finite.
#[pyfunction]
#[pyo3(signature = (input, residual, normalized_shape, weight=None, bias=None, eps=Argument::of(1e-5)))]
pub fn add_layer_norm(
    py: Python<'_>,
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: Shape,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: Argument<f64>,
) -> Result<(Tensor, Tensor)> {
    let eps = eps.get("add_layer_norm", "eps")?;
    let dims = trailing_dims("add_layer_norm", &input.0, &normalized_shape)?;
    let apply = || norms::add_layer_norm(&input.0, &residual.0, dims, inner(weight), inner(bias), eps);
    compute(py, input.0.elem_count(), apply).map(|(sum, y)| (Tensor(sum), Tensor(y)))
}

/// Compute layer_norm(input) * (1 + scale) + shift, where layer_norm is over the last dimension. Each sample of the
/// batch has its own scale and shift, as in adaLN of diffusion transformers (Peebles & Xie 2022, arXiv:2212.09748).
///
/// ```python
/// y = F.modulated_layer_norm(tc.randn(2, 16, 8), tc.zeros(2, 8), tc.zeros(2, 8))
/// assert y.shape == (2, 16, 8)
/// ```
///
/// Args:
///     input: (B, ..., features).
///     scale: (B, features).
///     shift: (B, features).
///     eps: added to the variance.
///
/// Returns:
///     A tensor of the input's shape and dtype.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `eps` is negative or not finite.
#[pyfunction]
#[pyo3(signature = (input, scale, shift, eps=Argument::of(1e-6)))]
pub fn modulated_layer_norm(
    py: Python<'_>,
    input: &Tensor,
    scale: &Tensor,
    shift: &Tensor,
    eps: Argument<f64>,
) -> Result<Tensor> {
    let eps = eps.get("modulated_layer_norm", "eps")?;
    let apply = || norms::modulated_layer_norm(&input.0, &scale.0, &shift.0, eps);
    compute(py, input.0.elem_count(), apply).map(Tensor)
}

/// Apply root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467) of the last dimension.
///
/// ```python
/// y = F.rms_norm(tc.randn(2, 8), 8, weight=tc.ones(8))
/// assert y.shape == (2, 8)
/// ```
///
/// Args:
///     input: (..., features).
///     normalized_shape: (features,) or features.
///     weight: scale, (features,).
///     eps: added to the mean square.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `eps` is negative or not finite, or `normalized_shape` has several dimensions.
#[pyfunction]
#[pyo3(signature = (input, normalized_shape, weight=None, eps=Argument::of(1e-6)))]
pub fn rms_norm(
    py: Python<'_>,
    input: &Tensor,
    normalized_shape: Shape,
    weight: Option<&Tensor>,
    eps: Argument<f64>,
) -> Result<Tensor> {
    let eps = eps.get("rms_norm", "eps")?;
    if trailing_dims("rms_norm", &input.0, &normalized_shape)? != 1 {
        let message = "normalized_shape has several dimensions, expected one; join the dimensions with reshape()";
        return Err(tc::Error::argument("rms_norm", message).into());
    }
    compute(py, input.0.elem_count(), || norms::rms_norm(&input.0, inner(weight), eps)).map(Tensor)
}

/// Apply group normalisation (Wu & He 2018, arXiv:1803.08494).
///
/// ```python
/// assert F.group_norm(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
/// ```
///
/// Args:
///     input: B samples of C channels, (B, C, ...).
///     num_groups: the number of groups of channels, a divisor of C.
///     weight: scale, (C,).
///     bias: shift, (C,).
///     eps: added to the variance.
///     channels_last: whether the layout of input and result is (B, ..., C). This layout needs no copies.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `num_groups` does not divide C, or `eps` is negative or not finite.
#[pyfunction]
#[pyo3(signature = (input, num_groups, weight=None, bias=None, eps=Argument::of(1e-5), *, channels_last=false))]
pub fn group_norm(
    py: Python<'_>,
    input: &Tensor,
    num_groups: Integer,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: Argument<f64>,
    channels_last: bool,
) -> Result<Tensor> {
    let eps = eps.get("group_norm", "eps")?;
    let num_groups = num_groups.count("group_norm", "num_groups")?;
    // `with_channels_last` calls `apply` with the input in the layout (B, ..., C), whatever the input's layout is.
    let apply = |x: &tc::Tensor| norms::group_norm(x, num_groups, inner(weight), inner(bias), eps);
    compute(py, input.0.elem_count(), || with_channels_last(&input.0, channels_last, apply)).map(Tensor)
}

/// Compute `silu(group_norm(input, ...))` in one operation. The tape does not save the result of `group_norm`.
///
/// ```python
/// assert F.group_norm_silu(tc.randn(1, 8, 4, 4), 2).shape == (1, 8, 4, 4)
/// ```
///
/// Args:
///     input: B samples of C channels, (B, C, ...).
///     num_groups: the number of groups of channels, a divisor of C.
///     weight: scale, (C,).
///     bias: shift, (C,).
///     eps: added to the variance.
///     channels_last: whether the layout of input and result is (B, ..., C). This layout needs no copies.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `num_groups` does not divide C, or `eps` is negative or not finite.
#[pyfunction]
#[pyo3(signature = (input, num_groups, weight=None, bias=None, eps=Argument::of(1e-5), *, channels_last=false))]
pub fn group_norm_silu(
    py: Python<'_>,
    input: &Tensor,
    num_groups: Integer,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: Argument<f64>,
    channels_last: bool,
) -> Result<Tensor> {
    let eps = eps.get("group_norm_silu", "eps")?;
    let num_groups = num_groups.count("group_norm_silu", "num_groups")?;
    let apply = |x: &tc::Tensor| norms::group_norm_silu(x, num_groups, inner(weight), inner(bias), eps);
    compute(py, input.0.elem_count(), || with_channels_last(&input.0, channels_last, apply)).map(Tensor)
}

/// Compute `rope(rms_norm(x, D, weight, eps), cos, sin, interleaved)` in one operation, for the queries and keys of
/// Flux and Qwen3.
///
/// ```python
/// angles = tc.randn(16, 4)
/// queries = F.rms_norm_rope(tc.randn(2, 16, 8), tc.ones(8), angles.cos(), angles.sin())
/// assert queries.shape == (2, 16, 8)
/// ```
///
/// Args:
///     x: S positions of D features, (..., S, D), D even.
///     weight: scale, (D,), in the dtype of `x` or f32; None for ones.
///     cos: (S, D / 2), cosines of the angles.
///     sin: (S, D / 2), sines of the angles.
///     interleaved: whether pair i consists of features 2 * i and 2 * i + 1, instead of features i and i + D / 2.
///     eps: added to the mean square.
///
/// Returns:
///     A tensor of the shape and dtype of `x`. Intermediate results are not rounded to that dtype.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if `eps` is negative or not finite.
///     NoBackwardError: if `cos` or `sin` needs a gradient.
#[pyfunction]
#[pyo3(signature = (x, weight, cos, sin, interleaved=false, eps=Argument::of(1e-6)))]
pub fn rms_norm_rope(
    py: Python<'_>,
    x: &Tensor,
    weight: Option<&Tensor>,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    eps: Argument<f64>,
) -> Result<Tensor> {
    let eps = eps.get("rms_norm_rope", "eps")?;
    let apply = || norms::rms_norm_rope(&x.0, inner(weight), &cos.0, &sin.0, interleaved, eps);
    compute(py, x.0.elem_count(), apply).map(Tensor)
}
