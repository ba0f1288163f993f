"""`Module`: named tensors and layers, found in attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from trainable_candle._core import Tensor, Var, tensor
from trainable_candle.errors import ArgumentError, DTypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

__all__ = ["LoadResult", "Module"]


class LoadResult(NamedTuple):
    """Which names did not match in `Module.load_state_dict`."""

    missing: list[str]
    unexpected: list[str]


class _Slot(NamedTuple):
    """A tensor and its place in a module."""

    name: str
    owner: Any
    key: Any
    tensor: Tensor


def _not_implemented(self: Module, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"{type(self).__name__} has no forward()")


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """The named values inside a module or a container."""
    if isinstance(node, Module):
        yield from ((key, value) for key, value in vars(node).items() if not key.startswith("_"))
    elif isinstance(node, dict):
        yield from node.items()
    else:
        yield from enumerate(node)


class Module:
    """The base of layers and models written in Python.

    Finds tensors, variables, modules, and lists and dicts of them in the attributes; nothing has to
    be registered. Names join attributes, indices and keys with dots ("blocks.0.fc.weight").
    Attributes that start with an underscore are left out.

        class MLP(tc.nn.Module):
            def __init__(self):
                self.layers = [tc.nn.Linear.init(64, 32), tc.nn.Linear.init(32, 10)]

            def forward(self, x):
                return self.layers[1](self.layers[0](x).relu())
    """

    training: bool = True
    forward: Callable[..., Any] = _not_implemented

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`."""
        return self.forward(*args, **kwargs)

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Iterate over this module (named "") and all inside it, each once."""
        yield from self._modules("", self, set())

    def _modules(self, name: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Module]]:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Module):
            yield name, node
        for key, value in _items(node):
            if isinstance(value, (Module, list, tuple, dict)):
                yield from self._modules(f"{name}.{key}" if name else str(key), value, seen)

    def _slots(self, prefix: str, node: Any, seen: set[int]) -> Iterator[_Slot]:
        if id(node) in seen:
            return
        seen.add(id(node))
        for key, value in _items(node):
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Tensor):
                yield _Slot(name, node, key, value)
            elif isinstance(value, (Module, list, tuple, dict)):
                yield from self._slots(name, value, seen)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor with its name, frozen ones and variables."""
        return {slot.name: slot.tensor for slot in self._slots("", self, set())}

    def named_parameters(self) -> dict[str, Var]:
        """Return the variables with their names; a shared one comes once."""
        seen: set[int] = set()
        named: dict[str, Var] = {}
        for name, value in self.named_tensors().items():
            if isinstance(value, Var) and id(value) not in seen:
                seen.add(id(value))
                named[name] = value
        return named

    def parameters(self) -> list[Var]:
        """Return the variables, in the order of their names."""
        return list(self.named_parameters().values())

    def zero_grad(self) -> None:
        """Clear the gradients of all variables."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def train(self, mode: bool = True) -> Self:
        """Switch this module and all inside it to training (dropout on) or not.

        Raises:
            ArgumentError: If the mode is neither true nor false.
        """
        if not isinstance(mode, bool):
            raise ArgumentError(f"train: mode is {mode!r}, expected True or False")
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch this module and all inside it to evaluation (dropout off)."""
        return self.train(mode=False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor with its name; later steps do not change the copies of variables."""
        named = self.named_tensors().items()
        return {name: tensor(t) if isinstance(t, Var) else t for name, t in named}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Load the values of a state: sets variables in place and replaces frozen tensors.

        Nothing changes unless everything fits. Values move to the device of the old ones.

        Args:
            state: Tensors or arrays by name.
            strict: Whether missing and unexpected names are an error.

        Returns:
            The missing and the unexpected names.

        Raises:
            ArgumentError: If names are missing or unexpected and `strict`.
            ShapeError: If a shape differs.
            DTypeError: If a dtype differs.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"load_state_dict: the state is {type(state).__name__}, expected a mapping"
            )
        slots = {slot.name: slot for slot in self._slots("", self, set())}
        missing = [name for name in slots if name not in state]
        unexpected = [name for name in state if name not in slots]
        if strict and (missing or unexpected):
            raise ArgumentError(
                f"load_state_dict: {_listed('missing', missing)}; "
                f"{_listed('unexpected', unexpected)}; pass strict=False to load the others"
            )
        values: list[tuple[_Slot, Tensor]] = []
        for name, slot in slots.items():
            if name in missing:
                continue
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
        for slot, value in values:
            _store(slot, value)
        return LoadResult(missing, unexpected)


def _listed(kind: str, names: list[str]) -> str:
    return f"{kind}: {', '.join(names) if names else 'none'}"


def _store(slot: _Slot, value: Tensor) -> None:
    if isinstance(slot.tensor, Var):
        slot.tensor.set(value)
    elif isinstance(slot.owner, Module):
        setattr(slot.owner, slot.key, tensor(value))
    else:
        slot.owner[slot.key] = tensor(value)
