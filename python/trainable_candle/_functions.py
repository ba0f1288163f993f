"""Torch's functions: those that call a tensor's method of the same name, and a few others.

The decorator `explained` puts a function's name in front of the messages of its errors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from trainable_candle import _core
from trainable_candle._explained import explained
from trainable_candle._generator import drawing
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainable_candle._core import Tensor
    from trainable_candle._generator import Generator

NAMES = (
    "abs", "all", "any", "argmax", "argmin", "argsort", "broadcast_to", "ceil", "chunk", "clamp",
    "clip", "clone", "cos", "cumsum", "erf", "exp", "flatten", "flip", "floor", "gather",
    "index_select", "isfinite", "isinf", "isnan", "log", "log1p", "log_softmax", "logsumexp",
    "masked_fill", "matmul", "max", "maximum", "mean", "min", "minimum", "narrow", "neg", "norm",
    "numel", "permute", "pow", "prod", "reciprocal", "relu", "repeat_interleave", "reshape",
    "roll", "round", "rsqrt", "scatter", "sigmoid", "sign", "sin", "softmax", "sort", "split",
    "sqrt", "square", "squeeze", "std", "sum", "t", "tanh", "tile", "topk", "transpose", "tril",
    "triu", "unbind", "unsqueeze", "var",
)  # fmt: skip
"""Methods of tensors that `tc` has as functions, too."""


def function(name: str) -> Callable[..., Any]:
    """Make a function that calls the method `name` of its first argument, a tensor."""

    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, _core.Tensor):
            raise TypeError(f"{name}: input is {type(input).__name__}, expected a Tensor")
        return getattr(input, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Return `input.{name}(...)`.\n\n{getattr(_core.Tensor, name).__doc__}"
    return call


@explained
def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor.

    ```python
    assert tc.is_tensor(tc.zeros(2)) and not tc.is_tensor([0.0])
    ```
    """
    return isinstance(value, _core.Tensor)


@explained
def concat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along a dimension; the same as `cat`.

    ```python
    assert tc.concat([tc.zeros(2), tc.ones(1)]).tolist() == [0.0, 0.0, 1.0]
    ```
    """
    return _core.cat(tensors, dim)


@explained
def allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether all pairs of elements differ by at most atol + rtol * |other|.

    The result is False if an element is NaN.

        assert tc.allclose(tc.ones(2), tc.ones(2) + 1e-9)

    Args:
        input: A tensor.
        other: A tensor whose shape broadcasts with that of `input`.
        rtol: The tolerance relative to the magnitude of `other`.
        atol: The absolute tolerance.

    Raises:
        TypeError: If an argument is not a tensor.
        ArgumentError: If the shapes do not broadcast.
    """
    for value in (input, other):
        if not isinstance(value, _core.Tensor):
            raise TypeError(f"allclose: found {type(value).__name__}, expected a Tensor")
    left, right = (value.detach().to("f64").numpy() for value in (input, other))
    return bool(np.allclose(left, right, rtol=rtol, atol=atol))


@explained
def linspace(
    start: float, end: float, steps: int, dtype: Any = None, device: str = "cpu"
) -> Tensor:
    """Return `steps` evenly spaced numbers from `start` to `end`, both included.

    If `steps` is 1, the result is `start`.

        assert tc.linspace(0, 1, 5).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]

    Args:
        start: The first number.
        end: The last number.
        steps: The length of the result.
        dtype: The dtype; default f32.
        device: The device.

    Raises:
        TypeError: If `start` or `end` is not a number, or `steps` is not a whole number.
        ArgumentError: If `steps` is negative.
        DTypeError, DeviceError, CudaUnavailableError: If dtype or device cannot be used.
    """
    first, last = _number("linspace", "start", start), _number("linspace", "end", end)
    numbers = np.linspace(first, last, _count("linspace", "steps", steps))
    return _core.tensor(numbers, dtype=dtype or "f32", device=device)


@explained
def randperm(n: int, device: str = "cpu", *, generator: Generator | None = None) -> Tensor:
    """Return the integers from 0 to n - 1 in random order, i64.

        assert sorted(tc.randperm(3).tolist()) == [0, 1, 2]

    Args:
        n: The length of the result.
        device: The device.
        generator: The generator that draws the values; by default the library's (`manual_seed`).

    Raises:
        TypeError: If `n` is not a whole number, or `generator` is not a `Generator`.
        ArgumentError: If `n` is negative.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
    """
    count = _count("randperm", "n", n)
    with drawing("randperm", generator):
        keys = _core.rand((count,), dtype="f64").numpy()
    order = np.argsort(keys, kind="stable")
    return _core.tensor(order.astype(np.int64), device=device)


@explained
def normal(
    mean: float,
    std: float,
    size: Sequence[int],
    device: str = "cpu",
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Return random f32 numbers from the normal distribution with a mean and a standard deviation.

        assert tc.normal(5.0, 0.1, (2, 3)).shape == (2, 3)

    Args:
        mean: The mean.
        std: The standard deviation.
        size: The sizes.
        device: The device.
        generator: The generator that draws the values; by default the library's (`manual_seed`).

    Raises:
        TypeError: If `mean` or `std` is not a number, `size` is not a sequence of integers, or
            `generator` is not a `Generator`.
        ArgumentError: If the deviation is negative.
        ShapeError: If a size is negative.
        DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
    """
    if _number("normal", "std", std) < 0:
        raise ArgumentError(f"normal: std is {std}, expected at least 0")
    with drawing("normal", generator):
        drawn = _core.randn(tuple(size), device=device)
    return drawn * float(std) + _number("normal", "mean", mean)


@explained
def multinomial(
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Draw indices, each with a probability in proportion to its weight, on the host.

        weights = tc.tensor([0.0, 1.0, 3.0])
        assert 0 not in tc.multinomial(weights, 5, replacement=True).tolist()

    Args:
        input: Weights of at least 0: (n,), or (rows, n); each row is a distribution of its own.
        num_samples: The number of indices to draw from each row.
        replacement: Whether an index may be drawn again.
        generator: The generator that draws the values; by default the library's (`manual_seed`).

    Returns:
        The indices, from 0 to n - 1: (num_samples,) or (rows, num_samples), i64.

    Raises:
        TypeError: If the weights are not a tensor, `num_samples` is not a whole number, or
            `generator` is not a `Generator`.
        ShapeError: If the weights are not a vector or a matrix.
        ArgumentError: If `num_samples` or a weight is negative, a weight is non-finite, all weights
            of a row are 0, or `replacement` is False and a row has fewer than `num_samples` weights
            above 0.
    """
    if not isinstance(input, _core.Tensor):
        raise TypeError(f"multinomial: input is {type(input).__name__}, expected a Tensor")
    if input.ndim not in {1, 2}:
        raise ShapeError(f"multinomial: the shape is {input.shape}, expected (n,) or (rows, n)")
    count = _count("multinomial", "num_samples", num_samples)
    weights = np.atleast_2d(input.detach().to("f64").numpy())
    if not np.isfinite(weights).all() or (weights < 0).any() or (weights.sum(1) <= 0).any():
        raise ArgumentError(
            "multinomial: expected finite weights of at least 0, in each row at least one above 0"
        )
    if not replacement and ((weights > 0).sum(1) < count).any():
        raise ArgumentError(
            f"multinomial: fewer than {count} weights of a row are above 0; draw fewer indices, or "
            "give replacement=True"
        )
    with drawing("multinomial", generator):
        shape = (len(weights), count) if replacement else weights.shape
        drawn = _core.rand(shape, dtype="f64").numpy()
    if replacement:
        # Index i of a row has the interval from end i - 1 to end i. "right" skips empty intervals.
        ends = np.cumsum(weights, 1) / weights.sum(1, keepdims=True)
        rows = zip(ends, drawn, strict=True)
        indices = np.stack(
            [np.searchsorted(row_ends, numbers, "right") for row_ends, numbers in rows]
        )
        # Rounding can leave the last end below 1.
        indices = np.minimum(indices, weights.shape[1] - 1)
    else:
        # For each index, draw an exponential variable whose rate is the index's weight. The sample
        # is the indices of the `count` smallest variables (Efraimidis and Spirakis 2006).
        with np.errstate(divide="ignore", invalid="ignore"):
            exponential = np.where(weights > 0, -np.log1p(-drawn) / weights, np.inf)
        indices = np.argsort(exponential, 1, kind="stable")[:, :count]
    result = _core.tensor(np.ascontiguousarray(indices, np.int64), device=input.device)
    return result if input.ndim == 2 else result.reshape((count,))


@explained
def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Multiply tensors, and sum over dimensions that the result lacks, like torch's einsum.

    A letter labels each dimension. Operands are multiplied from left to right, each step as one
    matrix product. In contrast to torch, a label may occur only once in each operand.

        x = tc.einsum("bij,bkj->bik", tc.ones(2, 3, 4), tc.ones(2, 5, 4))
        assert x.shape == (2, 3, 5)

    Args:
        equation: The labels of each operand's dimensions, separated by commas; then `->` and the
            labels of the result. Without `->`, the result has the labels that occur once, in
            alphabetical order.
        *operands: The tensors.

    Raises:
        TypeError: If the equation is not a string, or an operand is not a tensor.
        ArgumentError: If the equation does not fit the operands, uses `...`, or repeats a label
            within an operand or in the result.
    """
    if not isinstance(equation, str):
        raise TypeError(f"einsum: the equation is {type(equation).__name__}, expected a str")
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        joined = "".join(terms)
        output = "".join(sorted(label for label in set(joined) if joined.count(label) == 1))
    _check_einsum(equation, terms, output, operands)
    labels, result = terms[0], operands[0]
    # `following` is the index in `terms` after the one of `term`.
    for following, (term, operand) in enumerate(zip(terms[1:], operands[1:], strict=True), 2):
        kept = set(output).union(*terms[following:])
        labels, result = _product(labels, result, term, operand, kept)
    result = _summed(labels, result, set(output))
    labels = "".join(label for label in labels if label in output)
    return result.permute(*(labels.index(label) for label in output)) if output else result


def _check_einsum(
    equation: str, terms: Sequence[str], output: str, operands: Sequence[Tensor]
) -> None:
    subject = f"einsum: {equation!r}"
    if len(terms) != len(operands) or not operands:
        raise ArgumentError(f"{subject} has {len(terms)} operands, {len(operands)} are given")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        if not isinstance(operand, _core.Tensor):
            raise TypeError(f"einsum: found {type(operand).__name__}, expected a Tensor")
        if len(set(term)) != len(term) or not all(label.isalpha() for label in term):
            raise ArgumentError(
                f"{subject}: `{term}` has a label twice, or a character that is not a letter"
            )
        if len(term) != operand.ndim:
            raise ArgumentError(f"{subject}: `{term}` does not fit the shape {operand.shape}")
        for label, size in zip(term, operand.shape, strict=True):
            if sizes.setdefault(label, size) != size:
                raise ArgumentError(f"{subject}: `{label}` has sizes {sizes[label]} and {size}")
    if len(set(output)) != len(output) or not set(output) <= sizes.keys():
        raise ArgumentError(f"{subject}: `{output}` has a label twice, or one that no operand has")


def _summed(labels: str, tensor: Tensor, kept: set[str]) -> Tensor:
    """Sum over the dimensions whose labels are not in `kept`."""
    dims = [dim for dim, label in enumerate(labels) if label not in kept]
    return tensor.sum(tuple(dims)) if dims else tensor


def _product(
    a_labels: str, a: Tensor, b_labels: str, b: Tensor, kept: set[str]
) -> tuple[str, Tensor]:
    """Multiply two operands as matrices, and sum over labels that are not in `kept`.

    Args:
        a_labels: The labels of the dimensions of `a`.
        a: The first operand.
        b_labels: The labels of the dimensions of `b`.
        b: The second operand.
        kept: The labels that the result of `einsum` or a later operand has.

    Returns:
        The labels of the product's dimensions, and the product.
    """
    a, b = _summed(a_labels, a, kept | set(b_labels)), _summed(b_labels, b, kept | set(a_labels))
    a_labels = "".join(label for label in a_labels if label in kept or label in b_labels)
    b_labels = "".join(label for label in b_labels if label in kept or label in a_labels)
    batch = [label for label in a_labels if label in b_labels and label in kept]
    inner = [label for label in a_labels if label in b_labels and label not in kept]
    rows = [label for label in a_labels if label not in b_labels]
    columns = [label for label in b_labels if label not in a_labels]
    sizes = dict(zip(a_labels, a.shape, strict=True)) | dict(zip(b_labels, b.shape, strict=True))

    def grouped(tensor: Tensor, labels: str, groups: Sequence[Sequence[str]]) -> Tensor:
        """Permute to the order of `groups`, and flatten each group after the first."""
        order = [labels.index(label) for group in groups for label in group]
        shape = [sizes[label] for label in groups[0]]
        shape += [math.prod(sizes[label] for label in group) for group in groups[1:]]
        return (tensor.permute(*order) if order else tensor).reshape(tuple(shape))

    left = grouped(a, a_labels, (batch, rows, inner))
    right = grouped(b, b_labels, (batch, inner, columns))
    labels = [*batch, *rows, *columns]
    product = left.matmul(right).reshape(tuple(sizes[label] for label in labels))
    return "".join(labels), product


def _number(name: str, argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {argument} is {type(value).__name__}, expected a number")
    return float(value)


def _count(name: str, argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {argument} is {type(value).__name__}, expected a whole number")
    if value < 0:
        raise ArgumentError(f"{name}: {argument} is {value}, expected at least 0")
    return value
