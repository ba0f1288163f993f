"""Parameter groups with the interface of torch's `param_groups`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from trainable_candle._core import Optimizer, Tensor
from trainable_candle.errors import ArgumentError

__all__ = ["GroupedOptimizer", "ParamGroup", "iterators_to_lists", "set_groups"]


_INSTEAD = {
    "add_param_group": "give all groups to the constructor, with lr=0 for groups to train later",
    "state": "state_dict() has the states of the variables",
    "defaults": "param_groups has the hyper-parameters",
}
"""For attributes that torch's optimizers have and `GroupedOptimizer` lacks, what to use instead."""


class ParamGroup(MutableMapping[str, Any]):
    """The variables ("params") and hyper-parameters of one group of an optimizer.

    Setting "lr" changes the group's learning rate from the next step on. The variables and the
    other hyper-parameters are fixed. Users may add entries of other names; the optimizer keeps
    them.

        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    """

    def __init__(self, optimizer: Optimizer, index: int, stored: dict[str, Any]) -> None:
        self._optimizer, self._index, self._stored = optimizer, index, stored
        # The entries that users add. The optimizer's dict of the group stores them under the name
        # "", because each use of `param_groups` makes new objects of this class.
        self._added: dict[str, Any] = stored.setdefault("", {})

    def __getitem__(self, name: str) -> Any:
        """Return an entry."""
        if name == "lr":
            return self._optimizer.group_lrs[self._index]
        return self._added[name] if name in self._added else self._fixed()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the learning rate, or an entry that the user adds.

        Raises:
            ArgumentError: If the name is "params" or a fixed hyper-parameter, or the learning rate
                is negative or not finite.
        """
        if name == "lr":
            rates = self._optimizer.group_lrs
            rates[self._index] = float(value)
            self._optimizer.group_lrs = rates
        elif name in self._fixed():
            raise ArgumentError(
                f"param_groups: {name} is fixed, only lr can be set; make another optimizer with "
                f"the new {name} and give its load_state_dict this optimizer's state_dict()"
            )
        else:
            self._added[name] = value

    def __delitem__(self, name: str) -> None:
        """Remove an entry that the user added.

        Raises:
            KeyError: If the user added no such entry.
        """
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter([*self._fixed(), "lr", *self._added])

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._fixed()) + 1 + len(self._added)

    def __repr__(self) -> str:
        """Return the entries, with the number of variables instead of the variables."""
        shown = {name: value for name, value in self.items() if name != "params"}
        return f"ParamGroup({len(self['params'])} variables, {shown})"

    def _fixed(self) -> dict[str, Any]:
        """Return the variables and the hyper-parameters that cannot be set."""
        return {name: value for name, value in self._stored.items() if name not in {"", "lr"}}


class GroupedOptimizer(Optimizer):
    """An optimizer that stores the variables and hyper-parameters of its groups."""

    # The groups are plain data: a stored `ParamGroup` would refer back to the optimizer, and only
    # the garbage collector would then free the optimizer and its states.
    _groups: list[dict[str, Any]]

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups with their variables and hyper-parameters, of which only `lr` can be set."""
        return [ParamGroup(self, index, group) for index, group in enumerate(self._groups)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all variables.

        Args:
            set_to_none: Ignored: gradients are always None afterwards, as in torch by default.
        """
        del set_to_none
        super().zero_grad()

    # Type checkers do not see this method, because they would then accept every attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError; for names of torch's it says what to use instead."""
            advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            )


def set_groups(optimizer: GroupedOptimizer, params: Any, settings: Mapping[str, Any]) -> None:
    """Store the variables and hyper-parameters of each group in the optimizer.

    Args:
        optimizer: The optimizer.
        params: The variables or groups that the optimizer was made from, from `iterators_to_lists`.
        settings: The hyper-parameters of groups that do not set them.
    """
    optimizer._groups = _groups_of(params, settings)  # noqa: SLF001 - the class is in this file


def iterators_to_lists(params: Any) -> Any:
    """Return an optimizer's argument `params` with lists in place of iterators.

    The optimizer and `set_groups` both read `params`, and an iterator can be read only once. An
    argument of a wrong type is returned unchanged; the optimizer's constructor rejects it.

    Raises:
        TypeError: If `params` is a module.
    """
    if callable(getattr(params, "parameters", None)):
        raise TypeError(
            f"params is a {type(params).__name__}, expected variables: pass its parameters()"
        )
    if isinstance(params, (Mapping, Tensor)) or not isinstance(params, Iterable):
        return params
    return [
        {**item, "params": iterators_to_lists(item["params"])}
        if isinstance(item, Mapping) and "params" in item
        else item
        for item in params
    ]


def _groups_of(params: Any, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each group's variables and hyper-parameters; for the arguments see `set_groups`."""
    items = _values(params)  # not empty: the optimizer's constructor has rejected empty `params`
    groups = items if isinstance(items[0], Mapping) else [{"params": items}]
    return [{**settings, **group, "params": _values(group["params"])} for group in groups]


def _values(items: Any) -> list[Any]:
    """Return a list of the items, or of the values of a mapping."""
    return list(items.values()) if isinstance(items, Mapping) else list(items)
