"""Optimizers, gradient clipping, loss scaling and learning-rate schedules."""

from typing import Final

from trainable_candle._core import EMA, GradScaler, Optimizer, choices, clip_grad_norm_
from trainable_candle.optim import kinds, lr_scheduler
from trainable_candle.optim.kinds import *  # noqa: F403 - the registry's

_CLASSES: Final = {name.lower(): getattr(kinds, name) for name in kinds.__all__}
KINDS: Final[dict[str, type[Optimizer]]] = {name: _CLASSES[name] for name in choices()["optimizer"]}
"""The optimizers of the library's registry by the names that `--optimizer` takes."""

__all__ = ["EMA", "KINDS", "GradScaler", "Optimizer", "clip_grad_norm_", "lr_scheduler"]
__all__ += kinds.__all__
