"""`Module`, the base class of layers and models, which finds tensors and modules in attributes."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from trainable_candle._core import Tensor, Var, tensor, zeros
from trainable_candle.errors import ArgumentError, DTypeError
from trainable_candle.nn.state_dict import LoadResult, Slot, fitting, in_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Self

    from trainable_candle._core import DType, LoraConfig
    from trainable_candle.peft import ModuleAdapter

__all__ = ["LoadResult", "Module"]

_FLOATS: Final = ("f32", "f16", "bf16", "f64")
_HOOKS: Final = "write a subclass whose forward() does the hook's work"
_INSTEAD: Final = {
    "register_forward_hook": _HOOKS,
    "register_forward_pre_hook": _HOOKS,
    "register_full_backward_hook": "use tc.grad(loss, [tensor])",
    "register_parameter": "assign a tc.nn.Parameter to an attribute",
    "add_module": "assign the module to an attribute",
    "children": "named_children() has the modules inside, at any depth; modules() also this module",
    "buffers": "named_tensors() has every tensor",
    "named_buffers": "named_tensors() has every tensor",
    "cuda": 'use to("cuda")',
    "cpu": 'use to("cpu")',
    "half": 'use to("f16")',
    "bfloat16": 'use to("bf16")',
    "float": 'use to("f32")',
    "double": 'use to("f64")',
}
"""For attributes that torch's modules have and `Module` lacks, what to use instead."""


def _not_implemented(self: Module, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"{type(self).__name__} has no forward()")


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value) of everything directly inside a module or a container.

    The key is the name of an attribute, an index of a list or tuple, or a key of a dict.
    """
    if isinstance(node, Module):
        yield from node._parts()  # noqa: SLF001 - `Module` is in this file
    elif isinstance(node, dict):
        yield from node.items()
    else:
        yield from enumerate(node)


class Module:
    """The base of layers and models written in Python.

    A module finds tensors, variables, modules, and lists, tuples and dicts of them in its
    attributes; nothing has to be registered. A tensor's name joins attributes, indices and keys
    with dots ("blocks.0.fc.weight"). Attributes whose names start with an underscore are not
    searched.

        class MLP(tc.nn.Module):
            def __init__(self):
                self.layers = [tc.nn.Linear.init(64, 32), tc.nn.Linear.init(32, 10)]

            def forward(self, x):
                return self.layers[1](self.layers[0](x).relu())
    """

    training: bool = True
    _buffers: Mapping[str, bool] = MappingProxyType({})
    """For each registered buffer, by name, whether the buffer is in state dicts."""
    forward: Callable[..., Any] = _not_implemented

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`."""
        return self.forward(*args, **kwargs)

    # Type checkers do not see this method: with it, they would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError; for names of torch's modules it says what to use instead."""
            advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            )

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Set an attribute to a tensor that `requires_grad_` does not turn into a variable.

            class Scaled(tc.nn.Module):
                def __init__(self):
                    self.register_buffer("scale", tc.full((), 0.5), persistent=False)

                def forward(self, x):
                    return x * self.scale

            assert not Scaled().state_dict()

        Args:
            name: The name of the attribute.
            tensor: The value; None for a buffer that gets its tensor later.
            persistent: Whether `state_dict` has the tensor.

        Raises:
            TypeError: If the name is not a string, or the value is neither a tensor nor None.
            ArgumentError: If the name is not an identifier, starts with an underscore or is taken.
        """
        _check_buffer(name, tensor)
        if hasattr(self, name):
            raise ArgumentError(f"register_buffer: there is an attribute {name!r} already")
        self._buffers = {**self._buffers, name: persistent}
        setattr(self, name, tensor)

    def apply(self, function: Callable[[Module], Any]) -> Self:
        """Call a function with every module inside this one, and at the end with this one.

        ```python
        model.apply(lambda module: module.train())
        ```

        Raises:
            TypeError: If `function` is not callable.
        """
        if not callable(function):
            raise TypeError(f"apply: found {type(function).__name__}, expected a function")
        for module in reversed(list(self.modules())):
            function(module)
        return self

    def _parts(self) -> Iterable[tuple[Any, Any]]:
        """Return (key, value) of the attributes to search; names of tensors contain these keys."""
        return [(key, value) for key, value in vars(self).items() if not key.startswith("_")]

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Iterate over (name, module) of this module, named "", and of all inside it, each once."""
        yield from self._modules("", self, set())

    def modules(self) -> Iterator[Module]:
        """Iterate over this module and all inside it, each once."""
        return (module for _, module in self.named_modules())

    def _modules(self, name: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of `node`, if it is a module, and of every module inside it.

        `seen` has the ids of the modules and containers that the search has entered.
        """
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Module):
            yield name, node
        for key, value in _items(node):
            if isinstance(value, (Module, list, tuple, dict)):
                yield from self._modules(f"{name}.{key}" if name else str(key), value, seen)

    def _slots(self, prefix: str, node: Any, seen: set[int]) -> Iterator[Slot]:
        """Yield a slot for every tensor inside `node`, under names that start with `prefix`.

        A slot has the tensor, its name, its owner (a module or container) and its key in the owner.
        A module or container in several places is searched in the first place only; `seen` has the
        ids of those already searched. A tensor in several places has a slot for each place.
        """
        if id(node) in seen:
            return
        seen.add(id(node))
        for key, value in _items(node):
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Tensor):
                yield Slot(name, node, key, value)
            elif isinstance(value, (Module, list, tuple, dict)):
                yield from self._slots(name, value, seen)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor, frozen or variable, by its name.

        A tensor in several attributes occurs under each name; the tensors of a shared module occur
        under the first name only.
        """
        return {slot.name: slot.tensor for slot in self._slots("", self, set())}

    def named_parameters(self) -> dict[str, Var]:
        """Return the variables by their names; a shared variable occurs once."""
        seen: set[int] = set()
        named: dict[str, Var] = {}
        for name, value in self.named_tensors().items():
            if isinstance(value, Var) and id(value) not in seen:
                seen.add(id(value))
                named[name] = value
        return named

    def parameters(self) -> list[Var]:
        """Return the variables, in the order of `named_parameters`."""
        return list(self.named_parameters().values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all variables.

        Args:
            set_to_none: Ignored: gradients are always None afterwards, as in torch by default.
        """
        del set_to_none
        for parameter in self.parameters():
            parameter.zero_grad()

    def train(self, mode: bool = True) -> Self:
        """Switch this module and all inside it to training (dropout on), or to evaluation.

        Raises:
            ArgumentError: If the mode is neither True nor False.
        """
        if not isinstance(mode, bool):
            raise ArgumentError(f"train: mode is {mode!r}, expected True or False")
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch this module and all inside it to evaluation (dropout off)."""
        return self.train(mode=False)

    def to(
        self,
        target: DType | str | None = None,
        *,
        dtype: DType | str | None = None,
        device: str | None = None,
    ) -> Self:
        """Move all tensors to a device, and convert floating point ones to a dtype.

        Variables of another device or dtype are replaced by new variables without gradients. Call
        this before making an optimizer: an optimizer that holds replaced variables raises an error
        in its next step. The adapters of `LoRALinear` and `DoRALinear` stay f32.

        Args:
            target: A device or a dtype.
            dtype: A floating point dtype.
            device: A device.

        Raises:
            ArgumentError: If two devices or two dtypes are given, or a tensor is in a tuple.
            DTypeError: If the dtype is unknown or not a floating point one.
            DeviceError, CudaUnavailableError: If the device is unknown or cannot be used.
        """
        if isinstance(target, str) and target.partition(":")[0] in {"cpu", "cuda"}:
            given: list[object] = [target, device]
            device = target
        else:
            given = [target, dtype]
            dtype = dtype if target is None else target
        if None not in given:
            raise ArgumentError(f"to: found {given[0]!r} and {given[1]!r}, expected one of them")
        # A tensor reports the full name of its dtype and device: "cuda" becomes "cuda:0".
        new_dtype = None if dtype is None else zeros((), dtype=dtype).dtype
        if new_dtype is not None and new_dtype not in _FLOATS:
            raise DTypeError(f"to: the dtype is {new_dtype}, expected one of {', '.join(_FLOATS)}")
        new_device = None if device is None else zeros((), device=device).device

        def converted(value: Tensor) -> Tensor:
            is_float = value.dtype in _FLOATS
            to_dtype = new_dtype if new_dtype is not None and is_float else value.dtype
            to_device = new_device or value.device
            if value.dtype == to_dtype and value.device == to_device:
                return value
            return _alike(value.detach().to(to_dtype).to(to_device), value)

        return self._replace_tensors(converted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Turn floating point tensors other than buffers into variables, or freeze all variables.

        Tensors that become variables are copied. Call this before making an optimizer.

        Args:
            requires_grad: True for variables, False to freeze.

        Raises:
            ArgumentError: If `requires_grad` is neither True nor False, or a tensor is in a tuple.
        """
        if not isinstance(requires_grad, bool):
            raise ArgumentError(f"requires_grad_: found {requires_grad!r}, expected True or False")

        slots = self._slots("", self, set())
        buffers = {id(slot.tensor) for slot in slots if _persists(slot) is not None}

        # A buffer that is a variable is frozen in either case.
        def trained_or_frozen(value: Tensor) -> Tensor:
            if requires_grad and value.dtype in _FLOATS and id(value) not in buffers:
                return value if isinstance(value, Var) else Var(value)
            return value.detach() if isinstance(value, Var) else value

        return self._replace_tensors(trained_or_frozen)

    def _replace_tensors(self, convert: Callable[[Tensor], Tensor]) -> Self:
        """Replace every tensor by the result of `convert`; shared tensors stay shared."""
        slots = list(self._slots("", self, set()))
        # The items of a tuple cannot be replaced.
        in_tuples = [slot.name for slot in slots if isinstance(slot.owner, tuple)]
        if in_tuples:
            raise in_tuple(in_tuples[0])
        converted: dict[int, Tensor] = {}
        for slot in slots:
            if id(slot.tensor) not in converted:
                converted[id(slot.tensor)] = convert(slot.tensor)
        for slot in slots:
            old, new = slot.tensor, converted[id(slot.tensor)]
            _put(slot, new)
            if isinstance(old, Var) and isinstance(new, Var) and new is not old:
                old._replace()  # so that an optimizer with the old variable raises an error
        for module in self.modules():
            module._tensors_replaced()  # noqa: SLF001 - `Module` is in this file
        return self

    def _tensors_replaced(self) -> None:
        """Do nothing; subclasses react here to tensors that `to` or `requires_grad_` replaced."""

    def _facts(self) -> str:
        """Return the text between the parentheses of `repr`."""
        return ""

    def __repr__(self) -> str:
        """Return the classes of this module and of those inside it, with their `_facts`."""
        children = [
            f"  ({name}): " + repr(module).replace("\n", "\n  ")
            for name, module in self._direct_children("", self)
        ]
        facts = [f"  {self._facts()}"] if self._facts() else []
        if not children:
            return f"{type(self).__name__}({self._facts()})"
        return "\n".join([f"{type(self).__name__}(", *facts, *children, ")"])

    def _direct_children(self, prefix: str, node: Any) -> Iterator[tuple[str, Module]]:
        """Yield the modules in attributes, lists, tuples and dicts; not those in other modules."""
        for key, value in _items(node):
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from self._direct_children(name, value)

    def named_children(self) -> Iterator[tuple[str, Any, Any, Module]]:
        """Iterate over all modules inside, at any depth; a shared module occurs under each name.

        Yields the name, the owner (a module, list, tuple or dict), the key in the owner, and the
        module.
        """
        yield from self._all_children("", self, {id(self)})

    def _all_children(
        self, prefix: str, node: Any, ancestors: set[int]
    ) -> Iterator[tuple[str, Any, Any, Module]]:
        """Yield what `named_children` yields, for the modules inside `node`.

        `ancestors` has the ids of `node` and of everything around it; it ends cycles.
        """
        for key, value in _items(node):
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Module):
                yield name, node, key, value
            if isinstance(value, (Module, list, tuple, dict)) and id(value) not in ancestors:
                yield from self._all_children(name, value, ancestors | {id(value)})

    def add_adapter(self, config: LoraConfig) -> ModuleAdapter:
        """Freeze all parameters, and put trainable adapters on the layers that `config` selects.

        These can be `Linear` layers and convolutions (`Conv2d`).

        Args:
            config: The layers to adapt, and the kind and size of the adapters.

        Raises:
            ConfigError: If the configuration matches no layer, or its adapter does not suit the
                layers.
            ArgumentError: If a layer is in a tuple.
            TypeError: If `config` is not a `LoraConfig`.
        """
        from trainable_candle.peft import ModuleAdapter  # noqa: PLC0415 - it imports this module

        return ModuleAdapter(self, config)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor by its name, except buffers that are not persistent.

        Variables are copied, so later steps change no entry.
        """
        slots = self._state().values()
        return {s.name: tensor(s.tensor) if isinstance(s.tensor, Var) else s.tensor for s in slots}

    def _state(self) -> dict[str, Slot]:
        """Return the slots of the tensors that belong in a state dict, by name."""
        slots = self._slots("", self, set())
        return {slot.name: slot for slot in slots if _persists(slot) is not False}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Load the values of a state dict: set variables in place and replace frozen tensors.

        If any value does not fit, nothing changes. Values are copied to the devices of the tensors
        that they replace.

        Args:
            state: Tensors or arrays by name.
            strict: Whether missing and unexpected names are an error.

        Returns:
            The missing and the unexpected names; see `LoadResult`.

        Raises:
            ArgumentError: If names are missing or unexpected and `strict` is True, or a frozen
                tensor to replace is in a tuple.
            ShapeError: If a value has another shape than the module's tensor.
            DTypeError: If a value has another dtype than the module's tensor, or is not numbers.
            TypeError: If `state` is not a mapping.
        """
        result, values = fitting(self._state(), state, strict)
        for slot, value in values:
            _store(slot, value)
        return result


def _persists(slot: Slot) -> bool | None:
    """Return whether a buffer is in state dicts; None for tensors that are not buffers."""
    return slot.owner._buffers.get(slot.key) if isinstance(slot.owner, Module) else None  # noqa: SLF001 - `Module` is in this file


def _check_buffer(name: object, value: object) -> None:
    """Raise an error unless the name and the value suit a buffer; see `register_buffer`."""
    if not isinstance(name, str) or not (value is None or isinstance(value, Tensor)):
        types = f"{type(name).__name__} and {type(value).__name__}"
        raise TypeError(
            f"register_buffer: found {types}, expected a name (str) and a Tensor or None"
        )
    if not name.isidentifier() or name.startswith("_"):
        raise ArgumentError(
            f"register_buffer: the name is {name!r}, expected an identifier that does not start "
            "with an underscore"
        )


def _store(slot: Slot, value: Tensor) -> None:
    """Set a variable in place, or replace a frozen tensor by a copy of the value."""
    if isinstance(slot.tensor, Var):
        slot.tensor.set(value)
    else:
        _put(slot, tensor(value))


def _put(slot: Slot, value: Tensor) -> None:
    """Replace the tensor of a slot in its owner."""
    if isinstance(slot.owner, Module):
        setattr(slot.owner, slot.key, value)
    else:
        slot.owner[slot.key] = value


def _alike(value: Tensor, old: Tensor) -> Tensor:
    """Return the value, as a variable if the tensor `old` is a variable."""
    return Var(value) if isinstance(old, Var) else value
