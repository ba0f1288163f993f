"""Python's operators `//` and `%` for tensors, computed on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, DeviceError, Error, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle._core import DType, Tensor

__all__ = ["floor_divided", "remainder"]

_NARROW = ("bf16", "f16")
"""Dtypes whose values are divided in f32."""
_LARGEST = {
    "f16": 65504.0,
    "bf16": float.fromhex("0x1.fep127"),
    "f32": float.fromhex("0x1.fffffep127"),
    "f64": float.fromhex("0x1.fffffffffffffp1023"),
}
"""The largest finite number of each floating-point dtype."""


def floor_divided(name: str, dividend: Any, divisor: Any) -> Tensor:
    """Divide, and round down; at least one operand is a tensor.

    Args:
        name: The operation's name in error messages.
        dividend: A tensor, an array or a number.
        divisor: A tensor, an array or a number.

    Returns:
        The quotients, or `NotImplemented` if an operand is something else; Python then raises
        `TypeError`.

    Raises:
        ArgumentError: If the operands are integers and an element of the divisor is 0, or an
            operand is a number that the dtype of the result cannot represent.
        DTypeError: If the operands have dtypes that cannot be multiplied.
        ShapeError: If the operands' shapes do not broadcast.
        DeviceError: If the operands are on different devices.
    """
    quotients: Tensor = _computed(name, np.floor_divide, dividend, divisor)
    return quotients


def remainder(name: str, dividend: Any, divisor: Any) -> Tensor:
    """Return the remainders, with the signs of the divisor; at least one operand is a tensor.

    The derivative with respect to the dividend is 1. The derivative with respect to the divisor is
    the negative of the rounded-down quotient, or of the largest finite number if the quotient is
    infinite. Arguments and errors are those of `floor_divided`.

    Returns:
        The remainders, or `NotImplemented` as `floor_divided` returns it.
    """
    remainders: Any = _computed(name, np.remainder, dividend, divisor)
    if remainders is NotImplemented:
        return cast("Tensor", remainders)
    # The tape does not record what numpy computes. Each term added here is 0, so that it changes no
    # value, and has the derivative of the remainder with respect to one operand.
    if _needs_gradient(dividend):
        remainders = remainders + _zero(dividend, remainders.dtype)
    if _needs_gradient(divisor):
        quotients = floor_divided(name, dividend, divisor)
        # A large dividend by a small divisor can be infinite, and 0 times infinity would be NaN.
        largest = _LARGEST.get(str(quotients.dtype), math.inf)
        quotients = quotients.clamp(-largest, largest)
        remainders = remainders - _zero(divisor, remainders.dtype) * quotients
    return cast("Tensor", remainders)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, _core.Tensor) and value.requires_grad


def _zero(x: Tensor, dtype: DType) -> Tensor:
    """Return zeros through which gradients flow to the finite elements of x."""
    # An infinite element minus itself would be NaN.
    finite = _core.where(x.detach().abs() < math.inf, x, 0.0)
    return (finite - finite.detach()).to(dtype)


def _computed(name: str, function: Callable[..., Any], dividend: Any, divisor: Any) -> Any:
    """Call a numpy function; return a detached tensor on the operands' device, or NotImplemented.

    Arguments and errors are those of `floor_divided`.
    """
    tensor = next(value for value in (dividend, divisor) if isinstance(value, _core.Tensor))
    operands = [_operand(name, value, tensor.device) for value in (dividend, divisor)]
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
            "to get infinity or NaN there, divide tensor.float()"
        )
    with np.errstate(all="ignore"):
        result = function(*arrays)
    return _core.tensor(np.asarray(result), dtype=dtype, device=tensor.device)


def _operand(name: str, value: Any, device: str) -> Any:
    """Return a detached tensor for a tensor or an array, and a Python number for a numpy number.

    Other values are returned as they are.

    Raises:
        DeviceError: If the value is a tensor on another device.
    """
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, _core.Tensor):
        return _core.tensor(value) if hasattr(value, "__dlpack__") else value
    if value.device != device:
        raise DeviceError(f"{name}: found devices {device} and {value.device}; move one with to()")
    return value.detach()


def _dtype(dividend: Any, divisor: Any) -> DType:
    """Return the dtype of `dividend * divisor`, found by multiplying stand-ins of one element."""
    # Python numbers and 0-d tensors affect the dtype of a product less than other operands, so
    # their stand-ins are numbers and 0-d tensors, too.
    first, second = (
        _core.zeros((1,) if x.ndim else (), dtype=x.dtype)
        if isinstance(x, _core.Tensor)
        else type(x)(1)
        for x in (dividend, divisor)
    )
    product: Tensor = first * second
    return product.dtype


def _array(name: str, value: Any, dtype: DType) -> Any:
    """Return an operand, rounded to `dtype`, as a numpy array; f32 stands for narrow dtypes."""
    if not isinstance(value, _core.Tensor):
        try:
            value = _core.full((), value, dtype=dtype)
        except Error as error:
            # Put this operation's name in place of "full".
            raise type(error)(f"{name}: {str(error).partition(': ')[2]}") from None
    return value.to(dtype).to("f32" if dtype in _NARROW else dtype).numpy()
