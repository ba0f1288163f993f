"""Operators over tensors of two dtypes, by torch's rules of type promotion.

https://docs.pytorch.org/docs/2.11/tensor_attributes.html#type-promotion-doc

The extension computes in one dtype and raises where two differ. Its operators are tried first, so
that operands of one dtype cost no more than the call of a Python function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle import _core
from trainable_candle.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle._core import Tensor

_ARITHMETIC: Final = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
_CATEGORIES: Final = {"u8": 1, "u32": 1, "i64": 1, "f16": 2, "bf16": 2, "f32": 2, "f64": 2}
_ORDER: Final = ("u8", "u32", "i64", "f16", "bf16", "f32", "f64")


def attach() -> None:
    """Put the operators on `Tensor`."""
    for name in (*_ARITHMETIC, *_COMPARISONS):
        setattr(_core.Tensor, f"__{name}__", _operator(name))


def _operator(name: str) -> Callable[[Tensor, Any], Any]:
    inner: Callable[[Tensor, Any], Any] = getattr(_core.Tensor, f"__{name}__")
    divides = name in {"truediv", "rtruediv"}

    def call(self: Tensor, other: Any) -> Any:
        try:
            return inner(self, other)
        except DTypeError:
            dtype = _common(self, other, divides=divides)
            if dtype is None:
                raise
        except ArgumentError:
            if hasattr(other, "__dlpack__") and not isinstance(other, _core.Tensor):
                module, kind = type(other).__module__, type(other).__name__
                raise TypeError(
                    f"{name}: found a {kind} of {module}, expected a Tensor; convert it with "
                    "tc.from_dlpack"
                ) from None
            raise
        return inner(self.to(dtype), other.to(dtype) if isinstance(other, _core.Tensor) else other)

    call.__name__ = call.__qualname__ = f"__{name}__"
    call.__doc__ = inner.__doc__
    return call


def _common(self: Tensor, other: Any, *, divides: bool) -> str | None:
    """The dtype that both become, or none if the dtypes are not what is wrong."""
    one = str(self.dtype)
    if isinstance(other, _core.Tensor):
        two = str(other.dtype)
        if bool(self.ndim) == bool(other.ndim):
            found = _promoted(one, two)
        else:
            # A tensor without dimensions counts only with a higher category.
            high, low = (one, two) if self.ndim else (two, one)
            raises = _CATEGORIES[low] > _CATEGORIES[high]
            found = _promoted(high, low) if raises else high
    elif isinstance(other, (int, float)):
        two = found = one if isinstance(other, int) or _CATEGORIES[one] == 2 else "f32"
    else:
        return None
    if divides and _CATEGORIES[found] < 2:
        found = "f32"
    return None if found == one == two else found


def _promoted(one: str, two: str) -> str:
    if {one, two} == {"f16", "bf16"}:
        return "f32"
    return max(one, two, key=_ORDER.index)
