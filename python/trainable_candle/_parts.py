"""Helpers for the methods of tensors that are written in Python."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle._core import Tensor


def own(tensor: object) -> Tensor:
    """Return the argument, typed as a tensor.

    Classes that are not `Tensor` define the methods, so type checkers take `self` for another type.
    """
    return cast("Tensor", tensor)


def is_tensor(value: object) -> bool:
    return isinstance(value, _core.Tensor)


def is_mask(key: object) -> bool:
    return isinstance(key, _core.Tensor) and key.dtype == "u8"


def plain(value: Any) -> Any:
    """Return a tensor detached, and any other value as it is."""
    return value.detach() if is_tensor(value) else value


def no_tape() -> Any:
    """Return a context in which no operations are recorded."""
    from trainable_candle._grad_mode import no_grad  # noqa: PLC0415 - imported when first needed

    return no_grad()


def mask(op: str, value: Any, like: Any = None) -> Tensor:
    """Convert a mask, which is a u8 tensor or a bool, to a u8 tensor of zeros and ones.

    Args:
        op: The operator's name in the error message.
        value: The mask.
        like: A tensor on the device to which a bool goes.

    Raises:
        DTypeError: If the value is no mask. Torch's operators would combine the bits of integers.
    """
    kind = value.dtype.name if is_tensor(value) else type(value).__name__
    if kind not in {"u8", "bool", "bool_"}:
        raise DTypeError(
            f"{op}: found {kind}, expected a mask (u8 or bool), as comparisons return; "
            "`x != 0` is the mask of the elements that are not zero"
        )
    return true(value, like)


def true(value: Any, like: Any = None) -> Tensor:
    """Return a mask (u8): 1 where a tensor is not zero, else 0.

    A bool becomes a mask without dimensions on the device of `like`.
    """
    if not is_tensor(value):
        value = _core.full((), float(bool(value)), device=own(like).device)
    return cast("Tensor", value.detach() != 0)


def reduced(tensor: Tensor, how: str, dim: Any, keepdim: bool) -> Tensor:
    """Reduce a tensor over `dim`, or over all elements, by the method named `how`."""
    function = getattr(tensor, how)
    if dim is None:
        return cast("Tensor", function())
    if how in {"min", "max"} and isinstance(dim, (tuple, list)):
        # These methods take one dimension. Without `keepdim` they remove it, which changes the
        # numbers of later dimensions, so the last dimension is reduced first.
        for index in sorted((dim_index(how, tensor.shape, d) for d in dim), reverse=True):
            tensor = getattr(tensor, how)(index, keepdim=keepdim)
        return tensor
    return cast("Tensor", function(dim, keepdim=keepdim))


def dim_index(function: str, shape: Sequence[int], dim: int) -> int:
    """Return a dimension's number from 0; a negative `dim` counts from the end.

    Raises:
        ArgumentError: If the dimension is out of range; the message begins with `function`.
    """
    if not -len(shape) <= dim < len(shape):
        raise ArgumentError(
            f"{function}: dimension {dim} is out of range for the shape {tuple(shape)}"
        )
    return dim % len(shape)


def sizes_of(arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes that were given as separate arguments or as one sequence."""
    is_one = len(arguments) == 1 and isinstance(arguments[0], (tuple, list))
    return tuple(int(size) for size in (arguments[0] if is_one else arguments))


def order_of(function: str, x: Tensor, dim: int, *, descending: bool) -> Tensor:
    """Return the indices that sort a tensor along a dimension; equal values keep their order.

    Raises:
        ArgumentError: If the dimension is out of range; the message begins with `function`.
    """
    axis = dim_index(function, x.shape, dim)
    x = x.detach()
    values = (x.to("f32") if x.dtype in {"bf16", "f16"} else x).numpy()
    if descending:
        # An ascending sort of the flipped values, flipped back, is a descending sort that keeps the
        # order of equal values. Flipping the ascending sort below would reverse their order.
        flipped = np.argsort(np.flip(values, axis), axis=axis, kind="stable")
        order = np.flip(values.shape[axis] - 1 - flipped, axis)
    else:
        order = np.argsort(values, axis=axis, kind="stable")
    return _core.tensor(np.ascontiguousarray(order, np.int64), device=x.device)


def argmin_of(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Return the index of the smallest element; see `Tensor.argmin`."""
    # `argmax` takes floating point tensors only.
    floats = x if x.dtype in {"f32", "f16", "bf16", "f64"} else x.to("f64")
    found = (-floats).argmax(dim, keepdim)
    if x.dtype == "i64":
        # No floating point dtype has all of these integers, so the host finds the indices; `found`
        # only gives their shape.
        exact = np.asarray(np.argmin(x.numpy(), dim), np.int64).reshape(found.shape)
        found = _core.tensor(exact, device=x.device)
    return found


def norm_of(x: Tensor, p: Any, dim: Any, keepdim: bool) -> Tensor:
    """Return the p-norm; see `Tensor.norm`.

    Raises:
        ArgumentError: If p is neither a number above 0, which may be infinite, nor "fro" (2).
    """
    p = 2 if p == "fro" else p
    if not isinstance(p, (int, float)) or not p > 0:
        raise ArgumentError(f'norm: p is {p!r}, expected a number above 0 or "fro"')
    if p == 2:
        return _power(reduced(x * x, "sum", dim, keepdim), 0.5)
    if math.isinf(p):
        return reduced(x.abs(), "max", dim, keepdim)
    if p == 1:
        return reduced(x.abs(), "sum", dim, keepdim)
    return _power(reduced(_power(x.abs(), p), "sum", dim, keepdim), 1 / p)


def _power(base: Tensor, exponent: float) -> Tensor:
    """Return base ** exponent; its derivative at 0 is 0, as in torch's norms, for any exponent."""
    is_zero = base.detach() == 0
    positive = _core.where(is_zero, 1.0, base)
    powers = positive.sqrt() if exponent == 0.5 else positive**exponent
    return _core.where(is_zero, 0.0, powers)


def triangle(x: Tensor, keeps: Any) -> Tensor:
    """Return matrices with zeros where `keeps`, a function of row and column indices, is False."""
    if x.ndim < 2:
        raise ShapeError(f"tril, triu: the shape is {x.shape}, expected at least two dimensions")
    rows, columns = np.indices(x.shape[-2:])
    kept = _core.tensor(keeps(rows, columns).astype(np.uint8), device=x.device)
    return _core.where(kept.broadcast_to(x.shape), x, _core.zeros_like(x.detach()))


def integers_from(tensor: Tensor) -> float:
    """Return a magnitude from which the dtype has only integers: 2^52 for f64, else 2^23.

    2^23 is the least such magnitude of f32; those of f16 and bf16 are smaller.
    """
    return 2.0**52 if tensor.dtype == "f64" else 2.0**23


def numpy_key(key: Any) -> Any:
    """Return a key of `[]` with numpy arrays in place of tensors; u8 tensors are masks."""
    if isinstance(key, tuple):
        return tuple(numpy_key(part) for part in key)
    if is_mask(key):
        return key.numpy().astype(bool)
    return key.numpy() if is_tensor(key) else key


def on_host(tensor: Tensor) -> Any:
    """Return the values as a numpy array; bf16, which numpy lacks, becomes f32, exactly."""
    tensor = tensor.detach()
    return (tensor.to("f32") if tensor.dtype == "bf16" else tensor).numpy()
