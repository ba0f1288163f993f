"""Modules that contain other modules: a list, and a sequence that is called in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

from trainable_candle.nn.module import Module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

__all__ = ["ModuleList", "Sequential"]


class ModuleList(Module):
    """A list of modules; a plain list in an attribute works as well.

        layers = tc.nn.ModuleList(tc.nn.Linear(4, 4) for _ in range(3))
        for layer in layers:
            x = layer(x)

    Args:
        modules: The modules of the list, none by default.

    Raises:
        TypeError: If an item is not a module.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._items: list[Module] = []
        self.extend(modules)

    def append(self, module: Module) -> Self:
        """Add a module at the end.

        Raises:
            TypeError: If the item is not a module.
        """
        if not isinstance(module, Module):
            raise TypeError(
                f"{type(self).__name__}: found {type(module).__name__}, expected a Module"
            )
        self._items.append(module)
        return self

    def extend(self, modules: Iterable[Module]) -> Self:
        """Add modules at the end.

        Raises:
            TypeError: If the argument is not an iterable of modules.
        """
        if not isinstance(modules, Iterable):
            raise TypeError(
                f"{type(self).__name__}: found {type(modules).__name__}, expected an iterable of "
                "modules"
            )
        for module in modules:
            self.append(module)
        return self

    @overload
    def __getitem__(self, key: int) -> Module: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | slice) -> Module | Self:
        """Return the module at an index, or a container of this class with a slice's modules."""
        if isinstance(key, slice):
            container = type(self)()
            container.extend(self._items[key])
            return container
        return self._items[key]

    def __setitem__(self, key: int, module: Module) -> None:
        """Replace the module at an index.

        Raises:
            TypeError: If the item is not a module.
        """
        if not isinstance(module, Module):
            raise TypeError(
                f"{type(self).__name__}: found {type(module).__name__}, expected a Module"
            )
        self._items[key] = module

    def __len__(self) -> int:
        """Count the modules."""
        return len(self._items)

    def __iter__(self) -> Iterator[Module]:
        """Iterate over the modules."""
        return iter(self._items)

    def _parts(self) -> Iterable[tuple[Any, Any]]:
        # A module is named by its index alone, as in torch: "0.weight", not "_items.0.weight".
        return enumerate(self._items)


class Sequential(ModuleList):
    """Modules that are called in order: the first with the input, others with the previous result.

        model = tc.nn.Sequential(tc.nn.Linear(4, 8), tc.nn.ReLU(), tc.nn.Linear(8, 2))
        assert model(x).shape == (3, 2)

    Args:
        *modules: The modules, in the order of the calls.

    Raises:
        TypeError: If an item is not a module.
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, input: Any) -> Any:
        """Pass the input through all modules."""
        for module in self._items:
            input = module(input)
        return input
