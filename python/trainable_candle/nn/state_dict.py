"""What a module finds in a state dict: the values that fit its tensors, and the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainable_candle._core import Tensor, Var, tensor
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError


class LoadResult(NamedTuple):
    """Names that only the module has (`missing`) and that only the state dict has (`unexpected`).

    ```python
    result = model.load_state_dict({"0.weight": tc.zeros(8, 4)}, strict=False)
    assert "0.bias" in result.missing and result.unexpected == []
    ```
    """

    missing: list[str]
    unexpected: list[str]


class Slot(NamedTuple):
    """A tensor, with its full name, its owner (module, list, tuple or dict) and its key there."""

    name: str
    owner: Any
    key: Any
    tensor: Tensor


def fitting(
    slots: Mapping[str, Slot], state: Mapping[str, Any], strict: bool
) -> tuple[LoadResult, list[tuple[Slot, Tensor]]]:
    """Return the result of loading a state dict, and the slots whose names it has.

    Each of these slots comes with its new value, on the device of the slot's tensor.

    Raises:
        ArgumentError, ShapeError, DTypeError, TypeError: see `Module.load_state_dict`.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict: the state is {type(state).__name__}, expected a mapping")
    missing = [name for name in slots if name not in state]
    unexpected = [name for name in state if name not in slots]
    if strict and (missing or unexpected):
        raise ArgumentError(
            f"load_state_dict: {_listed('missing', missing)}; "
            f"{_listed('unexpected', unexpected)}; pass strict=False to load the names that "
            "both have"
        )
    values: list[tuple[Slot, Tensor]] = []
    for name, slot in slots.items():
        if name in missing:
            continue
        # A `Var` gets its value in place; any other tensor is replaced in its owner.
        if isinstance(slot.owner, tuple) and not isinstance(slot.tensor, Var):
            raise in_tuple(f"load_state_dict: {name}")
        value = state[name]
        value = value.detach() if isinstance(value, Tensor) else tensor(value)
        if value.shape != slot.tensor.shape:
            raise ShapeError(
                f"load_state_dict: {name} has shape {slot.tensor.shape}, "
                f"the state has {value.shape}"
            )
        if value.dtype != slot.tensor.dtype:
            raise DTypeError(
                f"load_state_dict: {name} is {slot.tensor.dtype}, "
                f"the state has {value.dtype}; convert it with to()"
            )
        values.append((slot, value.to(slot.tensor.device)))
    return LoadResult(missing, unexpected), values


def _listed(kind: str, names: list[str]) -> str:
    return f"{kind}: {', '.join(names) if names else 'none'}"


def in_tuple(name: str) -> ArgumentError:
    """Return the error for a tensor in a tuple, which cannot be replaced."""
    return ArgumentError(f"{name} is in a tuple, which cannot change; use a list")
