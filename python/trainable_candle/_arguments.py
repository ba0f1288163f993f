"""Torch's and numpy's other names of arguments, and what to use for methods that are not here."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import _core

if TYPE_CHECKING:
    from collections.abc import Callable

_REDUCTIONS: Final = (
    "sum", "mean", "max", "min", "var", "argmax", "softmax", "cumsum", "logsumexp",
)  # fmt: skip
_OTHER: Final = {"axis": "dim", "keepdims": "keepdim"}
_MISSING: Final = {
    "register_hook": "use tc.grad(loss, [v]) and change the gradients it returns, or v.grad "
    "between backward() and the optimizer's step",
    "retain_grad": "use tc.grad(loss, [tensor]), which needs no preparation",
    "is_leaf": "a leaf is a tc.Var: isinstance(tensor, tc.Var)",
    "grad_fn": "tensor.requires_grad says whether there is a graph",
    "is_cuda": 'use tensor.device != "cpu"',
    "pin_memory": 'memory is not pinned by hand; move the tensor with to("cuda")',
    "share_memory_": "threads share tensors as they are",
    "data_ptr": "use tensor.__dlpack__(), which shares the memory",
    "stride": "tensors are contiguous or made so; use contiguous()",
}


def attach() -> None:
    """Put the arguments on the methods of `Tensor`."""
    for name in _REDUCTIONS:
        setattr(_core.Tensor, name, _renamed(getattr(_core.Tensor, name)))
    # Not in `ComposedMethods`, where a type checker would take every name for an attribute.
    _core.Tensor.__getattr__ = _missing  # type: ignore[attr-defined]


def _missing(tensor: Any, name: str) -> Any:
    """Raise what `__getattr__` has to, with what to use instead."""
    raise AttributeError(_advice(f"{type(tensor).__name__!r} object", name))


def _advice(owner: str, name: str) -> str:
    text = f"{owner} has no attribute {name!r}"
    if name in _MISSING:
        return f"{text}: {_MISSING[name]}"
    if name.endswith("_") and not name.startswith("_"):
        return f"{text}: a Tensor does not change; use {name[:-1]}, or a tc.Var and set()"
    return text


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method with numpy's names of its arguments, and of `var` torch's `unbiased`."""
    name = function.__name__

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for other in kwargs.keys() & _OTHER.keys():
            if _OTHER[other] in kwargs:
                raise TypeError(f"{name}: {other} and {_OTHER[other]} are the same argument")
            kwargs[_OTHER[other]] = kwargs.pop(other)
        if name == "var" and "unbiased" in kwargs:
            if "correction" in kwargs:
                raise TypeError("var: unbiased and correction are the same argument")
            kwargs["correction"] = int(bool(kwargs.pop("unbiased")))
        return function(*args, **kwargs)

    return call
