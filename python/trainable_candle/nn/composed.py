"""The functions of `nn.functional` that are composed of the core's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainable_candle import _core
from trainable_candle._explained import explained
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle._core import Tensor

__all__ = [
    "avg_pool2d",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "cosine_similarity",
    "elu",
    "interpolate",
    "kl_div",
    "leaky_relu",
    "max_pool2d",
    "normalize",
    "one_hot",
    "pad",
    "softplus",
]


@explained
def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """Return for each class an i64 row of zeros, with a 1 at the index of the class.

    ```python
    assert F.one_hot(tc.tensor([0, 2]), 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    ```

    Args:
        input: The indices of classes, from 0, in a tensor of any shape.
        num_classes: The length of a row; -1 for the largest index plus one.

    Raises:
        TypeError: If the input is not a tensor.
        DTypeError: If the indices are not integers.
        ArgumentError: If an index or `num_classes` is out of range.
    """
    _require("one_hot", input)
    if str(input.dtype) not in {"u8", "u32", "i64"}:
        raise DTypeError(
            f"one_hot: the dtype is {input.dtype}, expected indices of dtype i64, u32 or u8; "
            'convert them with `.to("i64")`'
        )
    if not -1 <= num_classes < 2**31:
        raise ArgumentError(f"one_hot: num_classes is {num_classes}, expected -1 or a length")
    values = input.detach().numpy().astype(np.int64)
    count = int(values.max(initial=-1)) + 1 if num_classes == -1 else num_classes
    if values.size and (values.min() < 0 or values.max() >= count):
        raise ArgumentError(
            f"one_hot: the classes are from {values.min()} to {values.max()}, expected 0 to below "
            f"{count}"
        )
    rows = np.zeros((values.size, count), np.int64)
    rows[np.arange(values.size), values.reshape(-1)] = 1
    return _core.tensor(rows.reshape((*values.shape, count)), device=input.device)


@explained
def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Add elements at both ends of dimensions, or remove them.

    ```python
    assert F.pad(tc.ones(2), (1, 0)).tolist() == [0.0, 1.0, 1.0]
    ```

    Args:
        input: Any tensor.
        pad: The numbers of elements to add at the start and at the end of the last dimension, then
            of the second to last dimension, and so on; negative numbers remove elements.
        mode: "constant"; torch's other modes are not supported.
        value: The value of the new elements.

    Raises:
        TypeError: If the input is not a tensor.
        ArgumentError: If the numbers do not fit the input, or the mode is not "constant".
    """
    _require("pad", input)
    if mode != "constant":
        raise ArgumentError(f'pad: mode is {mode!r}, expected "constant"')
    amounts = [int(amount) for amount in pad]
    if len(amounts) % 2 or len(amounts) > 2 * input.ndim:
        raise ArgumentError(
            f"pad: found {len(amounts)} numbers, expected pairs for at most {input.ndim} dimensions"
        )
    result = input
    for pair in range(len(amounts) // 2):
        dim = input.ndim - 1 - pair
        before, after = amounts[2 * pair : 2 * pair + 2]
        size = result.shape[dim]
        start, end = max(0, -before), size - max(0, -after)
        if end < start:
            raise ArgumentError(
                f"pad: {before} and {after} remove more than the {size} elements of dimension {dim}"
            )
        result = result.narrow(dim, start, end - start)
        parts = [result]
        for amount, is_start in ((before, True), (after, False)):
            if amount > 0:
                shape = (*result.shape[:dim], amount, *result.shape[dim + 1 :])
                new = _core.full(shape, value, dtype=result.dtype, device=result.device)
                parts = [new, *parts] if is_start else [*parts, new]
        result = _core.cat(parts, dim) if len(parts) > 1 else result
    return result


@explained
def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | None = None,
    mode: str = "nearest",
) -> Tensor:
    """Resize the dimensions after the first two by copying elements.

    The result equals that of torch's "nearest" for the same size. If `scale_factor` times an old
    size is not whole, torch copies other elements, unless it gets `recompute_scale_factor=True`.

    ```python
    assert F.interpolate(tc.zeros(1, 3, 4, 4), scale_factor=2).shape == (1, 3, 8, 8)
    ```

    Args:
        input: A tensor (B, C, ...).
        size: The new size of the dimensions after C: one number for all, or one for each.
        scale_factor: The factor of the sizes of all dimensions after C; the new sizes are rounded
            down. Excludes `size`.
        mode: "nearest"; torch's other modes are not supported.

    Raises:
        TypeError: If the input is not a tensor.
        ArgumentError: If not exactly one of `size` and `scale_factor` is given, the size does not
            fit the input, or the mode is not "nearest".
    """
    _require("interpolate", input)
    if mode != "nearest":
        raise ArgumentError(f'interpolate: mode is {mode!r}, expected "nearest"')
    if (size is None) == (scale_factor is None):
        raise ArgumentError("interpolate: expected size or scale_factor, and not both")
    old = input.shape[2:]
    if size is None:  # so `scale_factor` is given; `or 0` is only for the type checker
        new = [int(length * float(scale_factor or 0)) for length in old]
    else:
        new = [size] * len(old) if isinstance(size, int) else list(size)
    if len(new) != len(old) or min(new, default=1) < 1:
        raise ArgumentError(f"interpolate: the size {new} does not fit the shape {input.shape}")
    for dim, (old_size, new_size) in enumerate(zip(old, new, strict=True), 2):
        # As torch does, multiply by the ratio in f32.
        ratio = np.float32(old_size / new_size)
        indices = np.floor(np.arange(new_size) * ratio).astype(np.int64)
        indices = np.minimum(indices, old_size - 1)
        input = input.index_select(dim, _core.tensor(indices, device=input.device))
    return input


@explained
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve `input` (B, in, length) with `weight` (out, in / groups, kernel).

    ```python
    assert F.conv1d(tc.zeros(1, 3, 8), tc.zeros(4, 3, 3), padding=1).shape == (1, 4, 8)
    ```

    Args:
        input: (B, in, length).
        weight: The kernels, (out, in / groups, kernel).
        bias: (out,), or None.
        stride: How many input positions the kernel moves from one output position to the next.
        padding: The number of zeros at each end of `input`.
        dilation: How many input positions one kernel element is from the next.
        groups: The number of groups of channels; an output channel reads only its own group.

    Returns:
        (B, out, length').

    Raises:
        TypeError: If an operand is not a tensor.
        ShapeError, DTypeError, DeviceError: If the operands' shapes, dtypes or devices do not fit
            together.
        ArgumentError: If a number is out of range.
    """
    _require("conv1d", input, weight)
    if input.ndim != 3 or weight.ndim != 3:
        raise ShapeError(
            f"conv1d: found shapes {input.shape} and {weight.shape}, "
            "expected (B, in, length) and (out, in / groups, kernel)"
        )
    result = _core.conv2d(
        input.unsqueeze(2),
        weight.unsqueeze(2),
        bias,
        (1, stride),
        (0, padding),
        (1, dilation),
        groups,
    )
    return result.squeeze(2)


@explained
def max_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
    """Return the largest element of each window of (B, C, height, width).

    ```python
    assert F.max_pool2d(tc.ones(1, 1, 4, 4), 2).tolist() == [[[[1.0, 1.0]] * 2]]
    ```

    Args:
        input: (B, C, height, width), or (C, height, width) without batch.
        kernel_size: The window's height and width, or one number for both.
        stride: The steps from one window to the next, in height and width, or one number for both;
            default: `kernel_size`.
        padding: The number of positions added on each side, in height and width, or one number for
            both. Their value is -3e38 (in f16: -6e4).

    Returns:
        (B, C, height', width'), or (C, height', width') without batch.

    Raises:
        TypeError: If the input is not a tensor.
        ShapeError: If the input has another number of dimensions, or is smaller than a window.
        ArgumentError: If a number is out of range, or `padding` is more than half of `kernel_size`.
    """
    by_position = _by_position("max_pool2d", input, kernel_size, stride, padding, -3.0e38)
    result = by_position[0]
    for elements in by_position[1:]:
        result = result.maximum(elements)
    return result


@explained
def avg_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Tensor:
    """Return the mean of each window of (B, C, height, width), in which padding counts as zeros.

    ```python
    assert F.avg_pool2d(tc.ones(1, 1, 4, 4), 2).tolist() == [[[[1.0, 1.0]] * 2]]
    ```

    Args:
        input: (B, C, height, width), or (C, height, width) without batch.
        kernel_size: The window's height and width, or one number for both.
        stride: The steps from one window to the next, in height and width, or one number for both;
            default: `kernel_size`.
        padding: The number of zeros added on each side, in height and width, or one number for
            both.

    Returns:
        (B, C, height', width'), or (C, height', width') without batch.

    Raises:
        TypeError: If the input is not a tensor.
        ShapeError: If the input has another number of dimensions, or is smaller than a window.
        ArgumentError: If a number is out of range, or `padding` is more than half of `kernel_size`.
    """
    by_position = _by_position("avg_pool2d", input, kernel_size, stride, padding, 0.0)
    result = by_position[0]
    for elements in by_position[1:]:
        result = result + elements
    return result * (1.0 / len(by_position))


@explained
def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, reduction: str = "mean"
) -> Tensor:
    """Return the binary cross-entropy of the probabilities sigmoid(input) against `target`.

    ```python
    loss = F.binary_cross_entropy_with_logits(tc.randn(4), tc.tensor([0.0, 1.0, 1.0, 0.0]))
    ```

    Args:
        input: Logits of any shape.
        target: Probabilities from 0 to 1, in the shape of `input`.
        reduction: "mean", "sum" or "none" (a loss for each element).

    Raises:
        TypeError: If an operand is not a tensor.
        ArgumentError: If the reduction is not "mean", "sum" or "none".
    """
    _require("binary_cross_entropy_with_logits", input, target)
    # With x the input and t the target, max(x, 0) - x t + log(1 + exp(-|x|)) cannot overflow.
    loss = input.relu() - input * target + softplus(-input.abs())
    return _reduce("binary_cross_entropy_with_logits", loss, reduction)


@explained
def kl_div(
    input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False
) -> Tensor:
    """Return the Kullback-Leibler divergence, whose terms are target * (log(target) - input).

    ```python
    x = tc.randn(3, 4)
    loss = F.kl_div(F.log_softmax(x), F.softmax(tc.randn(3, 4)), reduction="sum")
    ```

    Args:
        input: The logarithms of the probabilities that are compared with the target.
        target: The probabilities of the target distribution; their logarithms with `log_target`.
        reduction: "sum", "batchmean" (the sum divided by the first dimension), "mean" (of all
            terms) or "none" (the terms).
        log_target: Whether `target` holds logarithms.

    Raises:
        TypeError: If an operand is not a tensor.
        ArgumentError: If the reduction is unknown.
    """
    _require("kl_div", input, target)
    if log_target:
        loss = target.exp() * (target - input)
    else:
        # A target of 0 contributes 0, although its logarithm is infinite.
        is_zero = target.detach() <= 0
        logs = _core.where(is_zero, 1.0, target).log()
        loss = _core.where(is_zero, 0.0, target * logs) - target * input
    if reduction == "batchmean":
        return loss.sum() * (1.0 / input.shape[0])
    return _reduce("kl_div", loss, reduction)


@explained
def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return the input where it is above 0, elsewhere `negative_slope` times the input.

    ```python
    assert F.leaky_relu(tc.tensor([-1.0, 1.0]), 0.5).tolist() == [-0.5, 1.0]
    ```

    Raises:
        TypeError: If the input is not a tensor.
    """
    _require("leaky_relu", input)
    return input.relu() - (-input).relu() * negative_slope


@explained
def softplus(input: Tensor, beta: float = 1.0) -> Tensor:
    """Return log(1 + exp(beta * input)) / beta, without overflow.

    ```python
    assert F.softplus(tc.tensor([30.0])).tolist() == [30.0]
    ```

    Raises:
        TypeError: If the input is not a tensor.
    """
    _require("softplus", input)
    x = input * beta
    return (x.relu() + ((-x.abs()).exp() + 1).log()) * (1.0 / beta)


@explained
def elu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """Return the input where it is above 0, elsewhere alpha * (exp(input) - 1).

    ```python
    assert F.elu(tc.tensor([30.0])).tolist() == [30.0]
    ```

    Raises:
        TypeError: If the input is not a tensor.
    """
    _require("elu", input)
    # -relu(-x) is min(x, 0), for which exp cannot overflow.
    return input.relu() + ((-(-input).relu()).exp() - 1) * alpha


@explained
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Return the cosine of the angle between vectors along `dim`; norms are at least `eps`.

    ```python
    x = tc.randn(3, 4)
    assert F.cosine_similarity(x, x).shape == (3,)
    ```

    Raises:
        TypeError: If an operand is not a tensor.
    """
    _require("cosine_similarity", x1, x2)
    norms = [(x * x).sum(dim).maximum(eps * eps).sqrt() for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (norms[0] * norms[1])


@explained
def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Divide vectors along `dim` by their p-norms, or by `eps` where the norm is smaller.

    ```python
    x = tc.randn(3, 4)
    assert tc.allclose(F.normalize(x).norm(dim=1), tc.ones(3), rtol=1e-5)
    ```

    Raises:
        TypeError: If the input is not a tensor.
        ArgumentError: If `p` names no norm; see `Tensor.norm`.
    """
    _require("normalize", input)
    if p == 2:
        norm = (input * input).sum(dim, keepdim=True).maximum(eps * eps).sqrt()
    else:
        norm = input.norm(p, dim, keepdim=True).maximum(eps)
    return input / norm


def _require(name: str, *tensors: object) -> None:
    """Raise a `TypeError` in the name of a function unless its operands are tensors."""
    for tensor in tensors:
        if not isinstance(tensor, _core.Tensor):
            raise TypeError(f"{name}: found {type(tensor).__name__}, expected a Tensor")


def _reduce(name: str, loss: Tensor, reduction: str) -> Tensor:
    """Return the mean or the sum of the elements of a loss, or the loss itself for "none"."""
    if reduction not in {"mean", "sum", "none"}:
        raise ArgumentError(f"{name}: reduction is {reduction!r}, expected mean, sum or none")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _pair(name: str, argument: str, value: Any, least: int) -> tuple[int, int]:
    """Return the height and the width that an argument gives, which may be one number for both."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(number, int) and number >= least for number in pair):
        raise ArgumentError(
            f"{name}: {argument} is {value!r}, expected one or two numbers of at least {least}"
        )
    return pair[0], pair[1]


def _by_position(
    name: str, input: Tensor, kernel_size: Any, stride: Any, padding: Any, outside: float
) -> list[Tensor]:
    """Return, for each position in a window, the input elements at this position in all windows.

    Each result is (B, C, windows in height, windows in width), or without B. Padding has the value
    `outside`.
    """
    _require(name, input)
    if input.ndim not in {3, 4}:
        raise ShapeError(
            f"{name}: the shape is {input.shape}, expected (B, C, height, width) or (C, height, "
            "width)"
        )
    size = _pair(name, "kernel_size", kernel_size, 1)
    step = size if stride is None else _pair(name, "stride", stride, 1)
    added = _pair(name, "padding", padding, 0)
    if any(2 * count > side for count, side in zip(added, size, strict=True)):
        raise ArgumentError(
            f"{name}: padding is {padding}, expected at most half of kernel_size, {kernel_size}"
        )
    if any(added):
        # f16 has no finite values below -65504.
        outside = max(outside, -6.0e4) if input.dtype == "f16" else outside
        left_right_top_bottom = (added[1], added[1], added[0], added[0])
        input = pad(input, left_right_top_bottom, value=outside)
    # The numbers of windows in height and in width.
    counts = [(input.shape[d] - size[d]) // step[d] + 1 for d in (-2, -1)]
    if min(counts) < 1:
        raise ShapeError(
            f"{name}: kernel_size is {size}, which does not fit into the padded shape {input.shape}"
        )
    by_position = []
    for row in range(size[0]):
        rows = slice(row, row + (counts[0] - 1) * step[0] + 1, step[0])
        for column in range(size[1]):
            columns = slice(column, column + (counts[1] - 1) * step[1] + 1, step[1])
            by_position.append(input[..., rows, columns])
    return by_position
