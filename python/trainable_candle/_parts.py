"""Helpers for the methods of tensors that are written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle._core import Tensor


def own(tensor: object) -> Tensor:
    return cast("Tensor", tensor)


def is_tensor(value: object) -> bool:
    return isinstance(value, _core.Tensor)


def is_mask(key: object) -> bool:
    return isinstance(key, _core.Tensor) and key.dtype == "u8"


def plain(value: Any) -> Any:
    """Return a tensor detached, or a tuple of indices with numpy arrays in place of tensors."""
    if isinstance(value, tuple):
        return tuple(v.numpy() if is_tensor(v) else v for v in value)
    return value.detach() if is_tensor(value) else value


def no_tape() -> Any:
    from trainable_candle._grad_mode import no_grad  # noqa: PLC0415 - imported when first needed

    return no_grad()


def mask(op: str, value: Any, like: Any = None) -> Tensor:
    """Convert a mask, a u8 tensor or a bool, to a u8 tensor of zeros and ones.

    Raises:
        DTypeError: If the value has another dtype; torch's operators would combine its bits.
    """
    kind = value.dtype.name if is_tensor(value) else type(value).__name__
    if kind not in {"u8", "bool", "bool_"}:
        raise DTypeError(
            f"{op}: found {kind}, expected a mask (u8 or bool), as comparisons return; "
            "`x != 0` is the mask of the elements that are not zero"
        )
    return true(value, like)


def true(value: Any, like: Any = None) -> Tensor:
    if not is_tensor(value):
        value = _core.full((), float(bool(value)), device=own(like).device)
    return cast("Tensor", value.detach() != 0)


def reduced(tensor: Tensor, how: str, dim: Any, keepdim: bool) -> Tensor:
    function = getattr(tensor, how)
    if dim is None:
        return cast("Tensor", function())
    if how in {"min", "max"} and isinstance(dim, (tuple, list)):
        for place in sorted((place_of(how, tensor.shape, d) for d in dim), reverse=True):
            tensor = getattr(tensor, how)(place, keepdim=keepdim)
        return tensor
    return cast("Tensor", function(dim, keepdim=keepdim))


def place_of(function: str, shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ArgumentError(
            f"{function}: dimension {dim} is out of range for the shape {tuple(shape)}"
        )
    return dim % len(shape)


def sizes_of(sizes: Sequence[Any]) -> tuple[int, ...]:
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return tuple(int(size) for size in given)


def order_of(x: Tensor, dim: int, *, descending: bool) -> Tensor:
    place = place_of("sort", x.shape, dim)
    x = x.detach()
    values = (x.to("f32") if x.dtype in {"bf16", "f16"} else x).numpy()
    if descending:
        # An ascending sort of the flipped values, flipped back, is a descending sort in which equal
        # values keep their order, as they do in the ascending sort below.
        flipped = np.argsort(np.flip(values, place), axis=place, kind="stable")
        order = np.flip(values.shape[place] - 1 - flipped, place)
    else:
        order = np.argsort(values, axis=place, kind="stable")
    return _core.tensor(np.ascontiguousarray(order, np.int64), device=x.device)


def triangle(x: Tensor, keeps: Any) -> Tensor:
    if x.ndim < 2:
        raise ShapeError(f"tril, triu: the shape is {x.shape}, expected at least two dimensions")
    rows, columns = np.indices(x.shape[-2:])
    mask = _core.tensor(keeps(rows, columns).astype(np.uint8), device=x.device)
    return _core.where(mask.broadcast_to(x.shape), x, _core.zeros_like(x.detach()))
