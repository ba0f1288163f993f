"""Changes `Tensor` at import: adds `axis`, makes `device` a `tc.device`, adds advice to errors."""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import _core
from trainable_candle._device import device

if TYPE_CHECKING:
    from collections.abc import Callable

_LACK_AXIS: Final = ("argmax", "softmax", "cumsum")
"""Methods to which `attach` adds `axis`, another name of `dim`; `sum` and `mean` have both."""
_INSTEAD: Final = {
    "register_hook": "use tc.grad(loss, [v]) and change the gradients that it returns, or "
    "change v.grad between backward() and the optimizer's step",
    "retain_grad": "use tc.grad(loss, [tensor]), which needs no preparation",
    "grad_fn": "tensor.requires_grad says whether there is a graph",
    "is_cuda": 'use tensor.device.type == "cuda"',
    "pin_memory": 'memory is not pinned by hand; move the tensor with to("cuda")',
    "share_memory_": "nothing to do: threads share tensors as they are",
    "data_ptr": "use tensor.__dlpack__(), which shares the memory",
    "stride": "strides are not visible; use contiguous()",
}
"""Advice on attributes that torch's tensors have and `Tensor` lacks."""


def attach() -> None:
    """Change `Tensor` so that it takes more of torch's spellings, and its errors give advice.

    The methods in `_LACK_AXIS` take `axis` in place of `dim`. The attribute `device` becomes a
    `tc.device`, which is a string with torch's properties. Reading a missing attribute and
    assigning to `requires_grad` raise errors that give advice.
    """
    for name in _LACK_AXIS:
        setattr(_core.Tensor, name, _with_axis(getattr(_core.Tensor, name)))
    # `ComposedMethods` in `_methods.py` has the other methods that are added to `Tensor`. Type
    # checkers see it as the base of `Tensor`: with `__getattr__` there, they would accept every
    # name as an attribute.
    _core.Tensor.__getattr__ = _missing  # type: ignore[attr-defined]
    plain_device = vars(_core.Tensor)["device"]
    cached_device = lru_cache(device)
    _core.Tensor.device = property(  # type: ignore[method-assign,assignment]
        lambda tensor: cached_device(plain_device.__get__(tensor)), doc=plain_device.__doc__
    )
    plain_requires_grad = vars(_core.Tensor)["requires_grad"]
    _core.Tensor.requires_grad = property(  # type: ignore[method-assign,assignment]
        plain_requires_grad.__get__, _reject_assignment, doc=plain_requires_grad.__doc__
    )


def _reject_assignment(tensor: object, value: object) -> None:
    """Raise `AttributeError` for an assignment to `requires_grad`."""
    raise AttributeError(
        f"requires_grad of a {type(tensor).__name__} is fixed; "
        f"use x = x.requires_grad_({value!r}), "
        f"or module.requires_grad_({value!r}) for all parameters of a module"
    )


def _missing(tensor: Any, name: str) -> Any:
    """Raise `AttributeError`; the message says what to use instead, if that is known."""
    raise AttributeError(_message(f"{type(tensor).__name__!r} object", name))


def _message(owner: str, name: str) -> str:
    text = f"{owner} has no attribute {name!r}"
    if name in _INSTEAD:
        return f"{text}: {_INSTEAD[name]}"
    if name.endswith("_") and not name.startswith("_"):  # one of torch's in-place methods
        return f"{text}: a Tensor does not change; use {name[:-1]}, or a tc.Var and set()"
    return text


def _with_axis(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that also takes `axis`, as another name of `dim`."""
    name = method.__name__

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "axis" in kwargs:
            if "dim" in kwargs:
                raise TypeError(f"{name}: axis and dim are the same argument; give one")
            kwargs["dim"] = kwargs.pop("axis")
        return method(*args, **kwargs)

    return call
