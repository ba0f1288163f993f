"""Optimizers, gradient clipping, loss scaling and learning-rate schedules."""

from typing import Final

from trainable_candle import _core
from trainable_candle._core import (
    EMA,
    SGD,
    Adafactor,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    GradScaler,
    Lion,
    Lion8bit,
    Optimizer,
    Prodigy,
    clip_grad_norm_,
)
from trainable_candle.optim import lr_scheduler

_CLASSES: Final = {name.lower(): kind for name, kind in vars(_core).items()}
KINDS: Final[dict[str, type[Optimizer]]] = {
    name: _CLASSES[name] for name in _core.choices()["optimizer"]
}
"""The optimizers of the library's registry by the names that `--optimizer` takes."""

__all__ = [
    "EMA",
    "KINDS",
    "SGD",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "GradScaler",
    "Lion",
    "Lion8bit",
    "Optimizer",
    "Prodigy",
    "clip_grad_norm_",
    "lr_scheduler",
]
