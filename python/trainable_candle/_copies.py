"""Makes `copy` and `pickle` reject objects whose state is in the extension.

Optimizers are rejected, too: `optim/kinds.py` calls `reject` for each of their classes.
"""

from __future__ import annotations

import copyreg
from typing import Any, Final, NoReturn

from trainable_candle import _core

_LOAD_STATE: Final = "load its state_dict() into a new one"
_CURES: Final = {
    _core.AdapterSet: "save() it, and load() the file into the adapter of another model",
    _core.QuantizedTensor: "quantize the tensor again, or share this object, which never changes",
    _core.EMA: _LOAD_STATE,
    _core.GradScaler: _LOAD_STATE,
    **dict.fromkeys(_core.Model.__subclasses__(), "load the model again from its files"),
}
"""For each class whose objects are rejected, except optimizers: what the error says to do
instead."""


def reject(kind: type, cure: str = _LOAD_STATE) -> None:
    """Make `copy` and `pickle` raise a TypeError for the objects of a class.

    Args:
        kind: the class.
        cure: what the error says to do instead.
    """

    def reduce(_: Any) -> NoReturn:
        raise TypeError(f"{kind.__name__} cannot be copied or pickled: {cure}")

    # `copy` and `pickle` both call the function that is registered here.
    copyreg.pickle(kind, reduce)


for _kind, _cure in _CURES.items():
    reject(_kind, _cure)
