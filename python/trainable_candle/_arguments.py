"""Adds to `Tensor`: the argument `axis`, checked device names, and advice on torch's attributes."""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import _core
from trainable_candle._device import device

if TYPE_CHECKING:
    from collections.abc import Callable

_RENAMED: Final = ("argmax", "softmax", "cumsum")
"""Methods to which `attach` adds `axis` as another name of `dim`; reductions already have both."""
_MISSING: Final = {
    "register_hook": "use tc.grad(loss, [v]) and change the gradients that it returns, or "
    "change v.grad between backward() and the optimizer's step",
    "retain_grad": "use tc.grad(loss, [tensor]), which needs no preparation",
    "is_leaf": "a leaf is a tc.Var: isinstance(tensor, tc.Var)",
    "grad_fn": "tensor.requires_grad says whether there is a graph",
    "is_cuda": 'use tensor.device.type == "cuda"',
    "pin_memory": 'memory is not pinned by hand; move the tensor with to("cuda")',
    "share_memory_": "threads share tensors as they are",
    "data_ptr": "use tensor.__dlpack__(), which shares the memory",
    "stride": "strides are not visible; use contiguous()",
}
"""What to use instead of attributes that torch's tensors have and `Tensor` lacks."""


def attach() -> None:
    """Change `Tensor`: `axis` works in place of `dim`, and errors about attributes give advice.

    The attribute `device` becomes a `tc.device`, which is a string with torch's properties.
    """
    for name in _RENAMED:
        setattr(_core.Tensor, name, _renamed(getattr(_core.Tensor, name)))
    # `__getattr__` is set here instead of in the class `ComposedMethods`, because there it would
    # make type checkers accept every name as an attribute.
    _core.Tensor.__getattr__ = _missing  # type: ignore[attr-defined]
    plain_device, checked = vars(_core.Tensor)["device"], lru_cache(device)
    _core.Tensor.device = property(  # type: ignore[method-assign,assignment]
        lambda tensor: checked(plain_device.__get__(tensor)), doc=plain_device.__doc__
    )
    requires_grad = _core.Tensor.requires_grad
    _core.Tensor.requires_grad = property(  # type: ignore[method-assign,assignment]
        requires_grad.__get__, _reject_assignment, doc=requires_grad.__doc__
    )


def _reject_assignment(tensor: object, value: object) -> None:
    """Raise `AttributeError` for an assignment to `requires_grad`."""
    raise AttributeError(
        f"requires_grad of a {type(tensor).__name__} is fixed; "
        f"use x = x.requires_grad_({value!r}), "
        f"or module.requires_grad_({value!r}) for all parameters of a module"
    )


def _missing(tensor: Any, name: str) -> Any:
    """Raise `AttributeError` with what to use instead."""
    raise AttributeError(_advice(f"{type(tensor).__name__!r} object", name))


def _advice(owner: str, name: str) -> str:
    text = f"{owner} has no attribute {name!r}"
    if name in _MISSING:
        return f"{text}: {_MISSING[name]}"
    if name.endswith("_") and not name.startswith("_"):
        return f"{text}: a Tensor does not change; use {name[:-1]}, or a tc.Var and set()"
    return text


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with `axis` as another name of `dim`."""
    name = function.__name__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "axis" in kwargs:
            if "dim" in kwargs:
                raise TypeError(f"{name}: axis and dim are the same argument")
            kwargs["dim"] = kwargs.pop("axis")
        return function(*args, **kwargs)

    return call
