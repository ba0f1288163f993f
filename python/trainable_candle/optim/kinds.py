"""One class for each optimizer of the registry in Rust; `kinds.pyi` declares the classes."""

from inspect import Parameter, Signature
from types import NoneType
from typing import Any

from trainable_candle._copies import reject
from trainable_candle._core import Optimizer, optimizer_kinds
from trainable_candle.optim.groups import GroupedOptimizer, iterators_to_lists, set_groups

_IGNORED = ("fused", "foreach")
"""Arguments of torch's optimizers that are accepted and ignored, because every step is fused."""
_OPTIMIZER_WIDE = {"stochastic_rounding": False, "states": "device"}
"""Arguments that every optimizer has and that hold for all its groups, with their defaults."""


def _class(name: str, doc: str, positional: int, defaults: dict[str, Any]) -> type[Optimizer]:
    """Make an optimizer's class; the first `positional` hyper-parameters may be positional."""
    parameters = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)]
    for index, (argument, default) in enumerate(defaults.items()):
        by_position = index < positional
        passing = Parameter.POSITIONAL_OR_KEYWORD if by_position else Parameter.KEYWORD_ONLY
        parameters.append(Parameter(argument, passing, default=default))
    for argument, default in _OPTIMIZER_WIDE.items():
        parameters.append(Parameter(argument, Parameter.KEYWORD_ONLY, default=default))
    signature = Signature(parameters)

    def new(cls: type[Optimizer], /, *args: Any, **kwargs: Any) -> GroupedOptimizer:
        for flag in _IGNORED:
            if not isinstance(value := kwargs.pop(flag, None), (bool, NoneType)):
                raise TypeError(f"{name}: {flag} is {value!r}, expected True, False or None")
        try:
            settings = signature.bind(*args, **kwargs).arguments
            params = iterators_to_lists(settings.pop("params"))
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        optimizer_wide = {
            argument: settings.pop(argument, value) for argument, value in _OPTIMIZER_WIDE.items()
        }
        optimizer = GroupedOptimizer.__new__(cls, name, params, settings, **optimizer_wide)
        set_groups(optimizer, params, {**defaults, **settings})
        return optimizer

    members = {"__new__": new, "__doc__": doc, "__signature__": signature}
    return type(name, (GroupedOptimizer,), {"__module__": "trainable_candle.optim", **members})


_CLASSES = {kind[0]: _class(*kind) for kind in optimizer_kinds()}  # kind[0] is the name
globals().update(_CLASSES)
for _optimizer_class in _CLASSES.values():
    # Copying and pickling raise: a copy would lack the state in the extension.
    reject(_optimizer_class)
__all__ = list(_CLASSES)
