"""One class for each optimizer of the library's registry; the stubs beside list them."""

from inspect import Parameter, Signature
from typing import Any

from trainable_candle._core import Optimizer, optimizer_kinds


def _class(name: str, doc: str, positional: int, defaults: dict[str, Any]) -> type[Optimizer]:
    parameters = [Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)]
    for index, (field, default) in enumerate(defaults.items()):
        by_position = index < positional
        kind = Parameter.POSITIONAL_OR_KEYWORD if by_position else Parameter.KEYWORD_ONLY
        parameters.append(Parameter(field, kind, default=default))
    signature = Signature(parameters)

    def new(cls: type[Optimizer], /, *args: Any, **kwargs: Any) -> Optimizer:
        try:
            settings = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        return Optimizer.__new__(cls, name, settings.pop("params"), settings)

    members = {"__new__": new, "__doc__": doc, "__signature__": signature}
    return type(name, (Optimizer,), {"__module__": "trainable_candle.optim", **members})


_CLASSES = {kind[0]: _class(*kind) for kind in optimizer_kinds()}
globals().update(_CLASSES)
__all__ = list(_CLASSES)
