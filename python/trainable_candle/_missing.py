"""What to use for torch's attributes of tensors that are not here."""

from __future__ import annotations

from typing import Any, Final

from trainable_candle import _core

_INSTEAD: Final = {
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
    """Let the errors of missing attributes of tensors say what to use."""
    # Not in `ComposedMethods`, where a type checker would take every name for an attribute.
    _core.Tensor.__getattr__ = _advise  # type: ignore[attr-defined]


def _advise(tensor: Any, name: str) -> Any:
    text = f"{type(tensor).__name__!r} object has no attribute {name!r}"
    if name in _INSTEAD:
        text += f": {_INSTEAD[name]}"
    elif name.endswith("_") and not name.startswith("_"):
        text += f": a Tensor does not change; use {name[:-1]}, or a tc.Var and set()"
    raise AttributeError(text)
