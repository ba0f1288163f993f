//! The functions of `trainable_candle.nn.functional` except norms and losses. If torch has a function, its argument
//! names and tensor layouts are torch's. Each function runs in `compute`, which also takes a number of elements
//! from which it judges how long the call takes: a long one releases the GIL.

use pyo3::prelude::*;
// The aliases avoid the names of the functions below.
use tc::ops::attention::{scaled_dot_product_attention as attention, varlen_attention as attention_of_segments};
use tc::ops::conv::{self, Conv2dOptions};
use tc::ops::{dropout as drop, fake_quantize as fake, gated, index, linear as lin, rope as rotary, upsample};
use trainable_candle_core as tc;

use crate::argument::Argument;
use crate::arguments::{Integer, Pair};
use crate::call::compute;
use crate::error::Result;
use crate::quantized::WeightArg;
use crate::tensor::Tensor;

/// The core's tensor in an optional argument.
pub fn inner(tensor: Option<&Tensor>) -> Option<&tc::Tensor> {
    tensor.map(|tensor| &tensor.0)
}

/// Compute `input @ weight.T + bias`.
///
/// ```python
/// y = F.linear(tc.randn(3, 4), tc.randn(2, 4), tc.zeros(2))
/// assert y.shape == (3, 2)
/// ```
///
/// Args:
///     input: (..., in_features).
///     weight: (out_features, in_features), or a quantized matrix that `quantize` returned. A quantized matrix gets no
///         gradient. The tape saves the input for the backward pass only if the weight needs a gradient.
///     bias: (out_features,).
///
/// Returns:
///     (..., out_features).
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
#[pyfunction]
#[pyo3(signature = (input, weight, bias=None))]
pub fn linear(py: Python<'_>, input: &Tensor, weight: WeightArg<'_>, bias: Option<&Tensor>) -> Result<Tensor> {
    let weight = weight.get();
    let work = input.0.elem_count().saturating_add(weight.dims().iter().product());
    compute(py, work, || lin::linear(&input.0, weight, inner(bias))).map(Tensor)
}

/// Round a matrix to the values that an 8-bit or 4-bit format can represent: products of a scale and a code (one of the
/// format's numbers). An element that would round to a number beyond the first or the last code is clipped to this
/// code.
///
/// The backward pass is the straight-through estimator: the gradient of an element is the gradient of its rounded
/// value, or 0 if the element is clipped. The backward pass treats scales as constants. `factors` get the gradient of
/// LSQ, equation 3 (<https://arxiv.org/abs/1902.08153>). LSQ, unlike this function, also clips elements that lie beyond
/// the last code and round to it.
///
/// ```python
/// weight = tc.Var(tc.randn(64, 64))
/// y = F.linear(tc.randn(2, 64), F.fake_quantize(weight, "int8"))
/// y.sum().backward()  # the weight gets the gradient of the rounded weight, except for clipped elements
/// ```
///
/// Args:
///     input: floating point, (out_features, in_features).
///     format: "int8" or "fp8" rounds as `quantize` followed by `dequantize` does. "nf4" does the same, but keeps
///         scales in f32. "int4" is the format of torchao's symmetric weights: integers from -8 to 7, with one scale
///         for each 32 elements of a row.
///     factors: one factor for each scale, row after row; each scale is multiplied by its factor.
///
/// Returns:
///     The rounded matrix, in the shape and dtype of the input.
///
/// Raises:
///     ShapeError: if the input is not a matrix, if it does not divide into the groups of elements that share a scale
///         ("int4": 32 elements of a row; "nf4": 64 elements of the matrix), or if the number of factors differs from
///         the number of scales.
///     DTypeError: if the input is not floating point.
///     ArgumentError: if the format is unknown.
#[pyfunction]
#[pyo3(signature = (input, format, factors=None))]
pub fn fake_quantize(py: Python<'_>, input: &Tensor, format: &str, factors: Option<&Tensor>) -> Result<Tensor> {
    let grid = format.parse()?;
    let rounded = || match factors {
        Some(factors) => fake::fake_quantize_by(&input.0, &factors.0, grid),
        None => fake::fake_quantize(&input.0, grid),
    };
    compute(py, input.0.elem_count(), rounded).map(Tensor)
}

/// Apply a two-dimensional convolution.
///
/// In the shapes, B is the number of images, C and O the numbers of their channels and of the result's, H and W their
/// height and width, OH and OW those of the result, and KH and KW those of the kernel.
///
/// ```python
/// y = F.conv2d(tc.randn(1, 3, 8, 8), tc.randn(4, 3, 3, 3), padding=1, stride=2)
/// assert y.shape == (1, 4, 4, 4)
/// ```
///
/// Args:
///     input: (B, C, H, W).
///     weight: (O, C / groups, KH, KW).
///     bias: (O,).
///     stride: distance between neighbouring windows in pixels: one number or (height, width).
///     padding: number of zero pixels added on each side: one number or (height, width).
///     dilation: distance in pixels between neighbouring elements of the kernel: one number or (height, width).
///     groups: number of groups of channels; each group is convolved separately.
///     channels_last: whether the layouts are input (B, H, W, C), weight (O, KH, KW, C / groups) and result
///         (B, OH, OW, O). Operands in these layouts need not be copied.
///
/// Returns:
///     (B, O, OH, OW); (B, OH, OW, O) with `channels_last`.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit, or if the kernel is larger than the padded
///         images.
///     ArgumentError: if a stride, a dilation or the number of groups is less than 1, or a padding is negative.
///     OutOfMemoryError: if the result does not fit into memory.
#[pyfunction]
#[pyo3(signature = (input, weight, bias=None, stride=Pair::of(1), padding=Pair::of(0), dilation=Pair::of(1),
    groups=Integer::of(1), *, channels_last=false))]
#[allow(clippy::too_many_arguments)] // torch's function has them
pub fn conv2d(
    py: Python<'_>,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: Integer,
    channels_last: bool,
) -> Result<Tensor> {
    const OP: &str = "conv2d";
    let options = Conv2dOptions {
        stride: stride.get(OP, "stride")?,
        padding: padding.get(OP, "padding")?,
        dilation: dilation.get(OP, "dilation")?,
        groups: groups.count(OP, "groups")?,
    };
    let apply = if channels_last { conv::conv2d } else { conv::conv2d_nchw };
    compute(py, input.0.elem_count(), || apply(&input.0, &weight.0, inner(bias), options)).map(Tensor)
}

/// Call `apply`, which takes and returns the channels-last layout, on `x`. If `channels_last` is false, the channels
/// are the second dimension of both `x` and the result, and this function permutes the dimensions.
pub fn with_channels_last(
    x: &tc::Tensor,
    channels_last: bool,
    apply: impl Fn(&tc::Tensor) -> tc::Result<tc::Tensor>,
) -> tc::Result<tc::Tensor> {
    let rank = x.rank();
    // With two dimensions, the second one is also the last one.
    if channels_last || rank < 3 {
        return apply(x);
    }
    let to_last: Vec<usize> = std::iter::once(0).chain(2..rank).chain([1]).collect();
    let back: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    apply(&x.permute(&to_last)?)?.permute(&back)
}

/// Resize images as torch's `interpolate(mode="nearest")` does. Along a side of m pixels in the input and n pixels in
/// the result, pixel i of the result is a copy of pixel floor(i * m / n) of the input.
///
/// ```python
/// image = tc.tensor([[[[1.0, 2.0]]]])
/// assert F.upsample_nearest2d(image, scale_factor=2).tolist() == [[[[1.0, 1.0, 2.0, 2.0]] * 2]]
/// ```
///
/// Args:
///     input: (B, C, H, W): images, channels, height, width.
///     size: size of the result in pixels: one number or (height, width).
///     scale_factor: instead of `size`: the size of the result divided by the size of the input, one whole number or
///         (height, width).
///     channels_last: whether the layout of input and result is (B, H, W, C). An input in this layout need not be
///         copied.
///
/// Returns:
///     (B, C, height, width); (B, height, width, C) with `channels_last`.
///
/// Raises:
///     ArgumentError: if both or neither of `size` and `scale_factor` are given, or if a number in them is negative.
///     ShapeError: if the input does not have four dimensions, or has no pixels while the result has some.
///     DTypeError: if the input is not floating point.
///     OutOfMemoryError: if the result does not fit into memory.
#[pyfunction]
#[pyo3(signature = (input, size=None, scale_factor=None, *, channels_last=false))]
pub fn upsample_nearest2d(
    py: Python<'_>,
    input: &Tensor,
    size: Option<Pair>,
    scale_factor: Option<Pair>,
    channels_last: bool,
) -> Result<Tensor> {
    const OP: &str = "upsample_nearest2d";
    let size = size.map(|size| size.get(OP, "size")).transpose()?;
    let scale_factor = scale_factor.map(|factor| factor.get(OP, "scale_factor")).transpose()?;
    let apply = |x: &tc::Tensor| match (size, scale_factor) {
        (Some(size), None) => upsample::upsample_nearest2d(x, size),
        (None, Some(factor)) => {
            // `x` has its channels last: its dimensions 1 and 2 are height and width.
            let scaled = |axis: usize| x.dims().get(axis + 1).map_or(0, |size| size.saturating_mul(factor[axis]));
            upsample::upsample_nearest2d(x, [scaled(0), scaled(1)])
        }
        _ => Err(tc::Error::argument(OP, "expected exactly one of size and scale_factor")),
    };
    if input.0.rank() != 4 {
        let found = input.0.dims();
        return Err(tc::Error::shape(OP, format!("the input has shape {found:?}, expected four dimensions")).into());
    }
    compute(py, input.0.elem_count(), || with_channels_last(&input.0, channels_last, apply)).map(Tensor)
}

/// Compute `input * sigmoid(1.702 * input)`: CLIP's approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).
///
/// ```python
/// assert F.quick_gelu(tc.tensor([0.0, 10.0])).tolist() == [0.0, 10.0]
/// ```
///
/// Raises:
///     DTypeError: if the input is not floating point.
#[pyfunction]
pub fn quick_gelu(py: Python<'_>, input: &Tensor) -> Result<Tensor> {
    compute(py, input.0.elem_count(), || input.0.quick_gelu()).map(Tensor)
}

/// Compute `h * gelu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020,
/// arXiv:2002.05202).
///
/// ```python
/// assert F.geglu(tc.randn(2, 8)).shape == (2, 4)
/// ```
///
/// Args:
///     input: (..., 2 * n).
///
/// Returns:
///     (..., n).
///
/// Raises:
///     ShapeError: if the last dimension is odd.
///     DTypeError: if the input is not floating point.
#[pyfunction]
pub fn geglu(py: Python<'_>, input: &Tensor) -> Result<Tensor> {
    compute(py, input.0.elem_count(), || gated::geglu(&input.0)).map(Tensor)
}

/// Compute `h * silu(gate)`, where h is the first half of the last dimension and gate the second (Shazeer 2020,
/// arXiv:2002.05202).
///
/// ```python
/// assert F.swiglu(tc.randn(2, 8)).shape == (2, 4)
/// ```
///
/// Args:
///     input: (..., 2 * n).
///
/// Returns:
///     (..., n).
///
/// Raises:
///     ShapeError: if the last dimension is odd.
///     DTypeError: if the input is not floating point.
#[pyfunction]
pub fn swiglu(py: Python<'_>, input: &Tensor) -> Result<Tensor> {
    compute(py, input.0.elem_count(), || gated::swiglu(&input.0)).map(Tensor)
}

/// Compute softmax(query @ key.T * scale + mask) @ value (Vaswani et al. 2017, arXiv:1706.03762). The matrix of scores
/// is not stored, unless the mask needs a gradient.
///
/// ```python
/// q, k, v = (tc.randn(1, 2, 16, 8) for _ in range(3))  # one text, two heads, 16 tokens
/// assert F.scaled_dot_product_attention(q, k, v, is_causal=True).shape == (1, 2, 16, 8)
/// ```
///
/// Args:
///     query: (..., S, D): S queries of D features each.
///     key: (..., L, D): L keys.
///     value: (..., L, Dv): one value of Dv features for each key.
///     attn_mask: broadcastable to (..., S, L). A u8 mask is 1 where a query attends to a key and 0 elsewhere; a
///         floating-point mask is added to the scores. The result of a query that attends to no key is 0, or NaN if
///         the mask needs a gradient.
///     is_causal: whether the query at position i attends only to keys at positions 0 to i, also if a mask is given.
///     scale: factor of the scores; default 1 / sqrt(D).
///
/// Returns:
///     (..., S, Dv).
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     ArgumentError: if the scale is not finite.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask=None, *, is_causal=false, scale=Argument::of(None)))]
pub fn scaled_dot_product_attention(
    py: Python<'_>,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    attn_mask: Option<&Tensor>,
    is_causal: bool,
    scale: Argument<Option<f64>>,
) -> Result<Tensor> {
    let scale = scale.get("scaled_dot_product_attention", "scale")?;
    let work = query.0.elem_count().saturating_add(key.0.elem_count());
    compute(py, work, || attention(&query.0, &key.0, &value.0, inner(attn_mask), is_causal, scale)).map(Tensor)
}

/// Compute causal attention inside the segments of a packed row. A packed row is several sequences, the segments, one
/// after another. The result for a query is softmax(query @ key.T * scale) @ value over the keys of the query's
/// segment, up to the position of the query. On CUDA the host does not read `cu_seqlens`, so a recorded CUDA graph can
/// be replayed with other values in it.
///
/// ```python
/// q, k, v = (tc.randn(10, 2, 8) for _ in range(3))
/// y = F.varlen_attention(q, k, v, tc.tensor([0, 4, 10]))  # texts of 4 and 6 tokens
/// assert y.shape == (10, 2, 8)
/// ```
///
/// Args:
///     query: (N, heads, D): N tokens, D features per head.
///     key: (N, key_heads, D). `heads` must be a multiple of `key_heads`; head h of the query attends to key head
///         h // (heads // key_heads).
///     value: (N, key_heads, D).
///     cu_seqlens: (M + 1,), i64 or u32, ascending: 0, then the end of each of M segments. The last end may be
///         repeated, so that a tensor of fixed size can hold fewer segments. Tokens from the last end on belong to no
///         segment: their results and gradients are zeros.
///     window: the largest number of keys that a query attends to: the key at its own position, and those just before.
///         This is the sliding window of Mistral (Jiang et al. 2023, arXiv:2310.06825). Default: no limit.
///     scale: factor of the scores; default 1 / sqrt(D).
///
/// Returns:
///     (N, heads, D).
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     IndexOutOfRangeError: if `cu_seqlens` does not ascend from 0 to at most N. On CUDA, the next call that reads a
///         value or waits for the device raises this error; until then, the results are undefined.
///     ArgumentError: if the window is below 1, or the scale is not finite.
#[pyfunction]
#[pyo3(signature = (query, key, value, cu_seqlens, *, window=None, scale=Argument::of(None)))]
pub fn varlen_attention(
    py: Python<'_>,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    cu_seqlens: &Tensor,
    window: Option<Integer>,
    scale: Argument<Option<f64>>,
) -> Result<Tensor> {
    const OP: &str = "varlen_attention";
    let scale = scale.get(OP, "scale")?;
    let window = window.map(|window| window.at_least(OP, "window", 1)).transpose()?;
    let work = query.0.elem_count().saturating_add(key.0.elem_count());
    compute(py, work, || attention_of_segments(&query.0, &key.0, &value.0, &cu_seqlens.0, window, scale)).map(Tensor)
}

/// Zero each element with probability `p` and multiply the other elements by 1 / (1 - p) (Srivastava et al. 2014).
///
/// ```python
/// x = tc.ones(1000)
/// assert set(F.dropout(x, 0.5).tolist()) == {0.0, 2.0}
/// assert F.dropout(x, 0.5, training=False).tolist() == x.tolist()
/// ```
///
/// Args:
///     input: any shape.
///     p: the probability of zeroing an element, in [0, 1].
///     training: whether elements are dropped. If False, the result is the input.
///
/// Raises:
///     ArgumentError: if `p` is out of range.
///     DTypeError: if elements are to be dropped and the input is not floating point.
#[pyfunction]
#[pyo3(signature = (input, p=Argument::of(0.5), training=true))]
pub fn dropout(py: Python<'_>, input: &Tensor, p: Argument<f64>, training: bool) -> Result<Tensor> {
    let p = p.get("dropout", "p")?;
    compute(py, input.0.elem_count(), || drop::dropout(&input.0, p, training)).map(Tensor)
}

/// Return the rows of the table `weight` at the indices `input`.
///
/// ```python
/// table = tc.Var(tc.randn(100, 8))
/// assert F.embedding(tc.tensor([[1, 2, 3]]), table).shape == (1, 3, 8)
/// ```
///
/// Args:
///     input: indices of rows, i64 or u32, of any shape.
///     weight: the table, (entries, features).
///
/// Returns:
///     (..., features), where ... is the shape of `input`.
///
/// Raises:
///     IndexOutOfRangeError: if an index is not in 0 to entries - 1.
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
#[pyfunction]
pub fn embedding(py: Python<'_>, input: &Tensor, weight: &Tensor) -> Result<Tensor> {
    compute(py, weight.0.elem_count(), || index::embedding(&weight.0, &input.0)).map(Tensor)
}

/// Apply rotary position embedding (Su et al. 2021, arXiv:2104.09864): rotate each pair of features by an angle.
///
/// ```python
/// angles = tc.arange(16.0).reshape(16, 1) * tc.tensor([1.0, 0.1, 0.01, 0.001])
/// queries = F.rope(tc.randn(2, 16, 8), angles.cos(), angles.sin())
/// assert queries.shape == (2, 16, 8)
/// ```
///
/// Args:
///     x: (..., S, D): S positions, D features; D is even.
///     cos: (S, D / 2), cosines of the angles.
///     sin: (S, D / 2), sines of the angles.
///     interleaved: whether pair i consists of features 2 * i and 2 * i + 1, instead of features i and i + D / 2.
///
/// Raises:
///     ShapeError, DTypeError, DeviceError: if the operands do not fit.
///     NoBackwardError: if `cos` or `sin` needs a gradient.
#[pyfunction]
#[pyo3(signature = (x, cos, sin, interleaved=false))]
pub fn rope(py: Python<'_>, x: &Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
    compute(py, x.0.elem_count(), || rotary::rope(&x.0, &cos.0, &sin.0, interleaved)).map(Tensor)
}
