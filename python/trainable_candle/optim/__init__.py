"""Optimizers, gradient clipping, loss scaling and learning-rate schedules."""

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

__all__ = [
    "EMA",
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
