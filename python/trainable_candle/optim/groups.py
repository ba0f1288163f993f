"""The groups of an optimizer as torch shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainable_candle._core import Optimizer, Var

__all__ = ["ParamGroup"]


class ParamGroup(Mapping[str, Any]):
    """One group: its variables under "params", its learning rate under "lr", which can be set.

    Args:
        optimizer: The optimizer.
        index: The number of the group.
        params: Its variables.
    """

    def __init__(self, optimizer: Optimizer, index: int, params: list[Var]) -> None:
        self._optimizer = optimizer
        self._index = index
        self._params = params

    def __getitem__(self, name: str) -> Any:
        """Return the variables or the learning rate."""
        if name == "params":
            return self._params
        if name == "lr":
            return self._optimizer.group_lrs[self._index]
        raise KeyError(f"{name}: an optimizer's group has params and lr")

    def __setitem__(self, name: str, value: float) -> None:
        """Set the learning rate.

        Raises:
            ArgumentError: If it is negative or not finite.
            TypeError: If it is another entry than "lr".
        """
        if name != "lr":
            raise TypeError(f"param_groups: {name} cannot change; make another optimizer")
        rates = self._optimizer.group_lrs
        rates[self._index] = value
        self._optimizer.group_lrs = rates

    def __iter__(self) -> Iterator[str]:
        """Go through the names of the entries."""
        return iter(("params", "lr"))

    def __len__(self) -> int:
        """Return the number of entries."""
        return 2

    def __repr__(self) -> str:
        """Return the number of variables and the learning rate."""
        return f"ParamGroup(params={len(self._params)} variables, lr={self['lr']})"
