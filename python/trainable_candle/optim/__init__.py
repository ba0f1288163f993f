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

KINDS: Final = {
    name.lower(): kind
    for name, kind in sorted(vars(_core).items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""Every optimizer of the library by its name in lower case: what `--optimizer` takes."""

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
