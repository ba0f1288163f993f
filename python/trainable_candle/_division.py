"""Python's operators `//` and `%` for tensors, computed on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, DeviceError, Error, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle._core import DType, Tensor

__all__ = ["floor_divided", "remainder"]

_NARROW = ("bf16", "f16")


def floor_divided(name: str, one: Any, other: Any) -> Tensor:
    """Divide, and round down; at least one operand is a tensor.

    Args:
        name: The operation's name in error messages.
        one: The dividend.
        other: The divisor.

    Returns:
        The quotients, or `NotImplemented` if an operand is neither a tensor nor a number; Python
        then raises `TypeError`.

    Raises:
        ArgumentError: If the operands are integers and an element of the divisor is 0, or an
            operand is a number that the dtype of the result cannot represent.
        ShapeError: If the operands' shapes do not broadcast.
        DeviceError: If the operands are on different devices.
    """
    quotient: Tensor = _computed(name, np.floor_divide, one, other)
    return quotient


def remainder(name: str, one: Any, other: Any) -> Tensor:
    """Return the remainder, with the sign of the divisor; at least one operand is a tensor.

    The derivative with respect to the dividend is 1. The derivative with respect to the divisor is
    the negative of the rounded-down quotient. Arguments and errors are those of `floor_divided`.

    Returns:
        The remainders, or `NotImplemented` if an operand is neither a tensor nor a number.
    """
    rest: Any = _computed(name, np.remainder, one, other)
    if rest is not NotImplemented and _needs_gradient(one):
        rest = rest + _zero(one, rest.dtype)
    if rest is not NotImplemented and _needs_gradient(other):
        rest = rest - _zero(other, rest.dtype) * floor_divided(name, one, other)
    return cast("Tensor", rest)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, _core.Tensor) and value.requires_grad


def _zero(x: Tensor, dtype: DType) -> Tensor:
    """Return zeros through which gradients flow to x."""
    return (x - x.detach()).to(dtype)


def _computed(name: str, function: Callable[..., Any], one: Any, other: Any) -> Any:
    like = next(value for value in (one, other) if isinstance(value, _core.Tensor))
    operands = [_operand(name, value, like) for value in (one, other)]
    if not all(isinstance(value, (_core.Tensor, int, float)) for value in operands):
        return NotImplemented
    dtype = _dtype(*operands)
    arrays = [_array(name, value, dtype) for value in operands]
    try:
        np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        first, second = (list(array.shape) for array in arrays)
        raise ShapeError(f"{name}: shapes {first} and {second} do not broadcast together") from None
    if arrays[0].dtype.kind != "f" and not arrays[1].all():
        raise ArgumentError(
            f"{name}: the divisor is 0, or has an element 0; "
            "divide floating point numbers: tensor.float()"
        )
    with np.errstate(all="ignore"):
        found = function(*arrays)
    return _core.tensor(np.asarray(found), dtype=dtype, device=like.device)


def _operand(name: str, value: Any, like: Tensor) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, _core.Tensor):
        return _core.tensor(value) if hasattr(value, "__dlpack__") else value
    if value.device != like.device:
        raise DeviceError(
            f"{name}: found devices {like.device} and {value.device}; move one with to()"
        )
    return value.detach()


def _dtype(one: Any, other: Any) -> DType:
    """Return the dtype of `one * other`; Python numbers and 0-d tensors count as they do there."""
    first, second = (
        _core.zeros((1,) * bool(x.ndim), dtype=x.dtype)
        if isinstance(x, _core.Tensor)
        else type(x)(1)
        for x in (one, other)
    )
    result: Tensor = first * second
    return result.dtype


def _array(name: str, value: Any, dtype: DType) -> Any:
    if not isinstance(value, _core.Tensor):
        try:
            value = _core.full((), value, dtype=dtype)
        except Error as error:
            raise type(error)(f"{name}: {str(error).partition(': ')[2]}") from None
    return value.to(dtype).to("f32" if dtype in _NARROW else dtype).numpy()
