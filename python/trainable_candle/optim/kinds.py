"""One class for each optimizer of the library's registry; the stubs beside list them."""

from inspect import Parameter, Signature
from typing import Any

from trainable_candle._core import Optimizer, optimizer_kinds
from trainable_candle.optim.groups import ParamGroup

_HINTS = ("foreach", "fused", "capturable")
"""How torch is told to compute; here all variables are updated together on any device."""


def _class(name: str, doc: str, positional: int, defaults: dict[str, Any]) -> type[Optimizer]:
    parameters = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)]
    for index, (field, default) in enumerate(defaults.items()):
        by_position = index < positional
        kind = Parameter.POSITIONAL_OR_KEYWORD if by_position else Parameter.KEYWORD_ONLY
        parameters.append(Parameter(field, kind, default=default))
    signature = Signature(parameters)

    def new(cls: type[Optimizer], /, *args: Any, **kwargs: Any) -> Optimizer:
        kwargs = {key: value for key, value in kwargs.items() if key not in _HINTS}
        try:
            settings = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        params = list(settings.pop("params"))
        made = Optimizer.__new__(cls, name, params, settings)
        made.__dict__["_given"] = params
        return made

    members = {
        "__new__": new,
        "__doc__": doc,
        "__signature__": signature,
        "param_groups": property(_param_groups),
    }
    return type(name, (Optimizer,), {"__module__": "trainable_candle.optim", **members})


def _param_groups(optimizer: Any) -> list[ParamGroup]:
    """Return the groups with their variables and learning rates, as torch's optimizers do."""
    given = optimizer._given  # noqa: SLF001
    groups = [list(group["params"]) for group in given] if isinstance(given[0], dict) else [given]
    return [ParamGroup(optimizer, index, params) for index, params in enumerate(groups)]


_CLASSES = {kind[0]: _class(*kind) for kind in optimizer_kinds()}
globals().update(_CLASSES)
__all__ = list(_CLASSES)
