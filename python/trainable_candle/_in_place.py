"""Methods that change variables, under torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from trainable_candle import _core
from trainable_candle._generator import drawing
from trainable_candle._parts import own, plain
from trainable_candle.errors import ArgumentError

if TYPE_CHECKING:
    from trainable_candle._core import Tensor, Var
    from trainable_candle._generator import Generator

__all__ = ["VarMethods"]

_FLOATS = ("f32", "f16", "bf16", "f64")


# In this class, `own(self)` is `self`, typed as a tensor; `plain` detaches tensors.
class VarMethods:
    """In-place changes of variables, made with `Var.set`; each returns the variable.

    A result of another shape raises `ShapeError`.
    """

    @property
    def data(self) -> Tensor:
        """The value as a detached tensor."""
        return own(self).detach()

    def copy_(self, value: Tensor) -> Var:
        """Set the variable to a tensor's value, converted to the variable's dtype and device."""
        return _set(self, value.detach().to(own(self).dtype).to(own(self).device))

    def fill_(self, value: float) -> Var:
        """Set every element to a number."""
        var = own(self)
        return _set(self, _core.full(var.shape, value, dtype=var.dtype, device=var.device))

    def zero_(self) -> Var:
        """Set every element to zero."""
        return _set(self, _core.zeros_like(own(self).detach()))

    def add_(self, other: Any, alpha: float = 1) -> Var:
        """Add `alpha` times a tensor or a number."""
        return _set(self, own(self).detach() + plain(other) * alpha)

    def sub_(self, other: Any, alpha: float = 1) -> Var:
        """Subtract `alpha` times a tensor or a number."""
        return _set(self, own(self).detach() - plain(other) * alpha)

    def mul_(self, other: Any) -> Var:
        """Multiply by a tensor or a number."""
        return _set(self, own(self).detach() * plain(other))

    def div_(self, other: Any) -> Var:
        """Divide by a tensor or a number."""
        return _set(self, own(self).detach() / plain(other))

    def lerp_(self, end: Tensor, weight: float) -> Var:
        """Add `weight * (end - variable)`, as moving averages do."""
        start = own(self).detach()
        return _set(self, start + (end.detach() - start) * weight)

    def clamp_(self, min: Any = None, max: Any = None) -> Var:
        """Limit every element to the range from `min` to `max`; one of them may be None."""
        return _set(self, own(self).detach().clamp(min, max))

    def normal_(
        self, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None
    ) -> Var:
        """Set every element to a normally distributed random number, like `nn.init.normal_`.

        Raises:
            ArgumentError: If `std` is negative.
        """
        if not std >= 0:
            raise ArgumentError(f"normal_: std is {std}, expected at least 0")
        with drawing("normal_", generator):
            drawn = _core.randn(own(self).shape, dtype="f32", device=own(self).device)
        return _set(self, drawn * std + mean)

    def uniform_(
        self, a: float = 0.0, b: float = 1.0, *, generator: Generator | None = None
    ) -> Var:
        """Set every element to a random number, uniform in [a, b); to `a` if `b` equals `a`.

        Raises:
            ArgumentError: If `b` is less than `a`.
        """
        if not a <= b:
            raise ArgumentError(f"uniform_: a is {a} and b is {b}, expected a to be at most b")
        with drawing("uniform_", generator):
            drawn = _core.rand(own(self).shape, dtype="f32", device=own(self).device)
        return _set(self, drawn * (b - a) + a)


def _set(variable: object, value: Tensor) -> Var:
    """Set and return a variable; a floating-point value gets a floating-point variable's dtype."""
    var = cast("Var", variable)
    are_floats = var.dtype in _FLOATS and value.dtype in _FLOATS
    var.set(value.to(var.dtype) if are_floats else value)
    return var
