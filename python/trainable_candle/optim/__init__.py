"""Optimizers, gradient clipping, loss scaling, moving averages and learning-rate schedules."""

from typing import Any, Final

from trainable_candle._core import EMA, GradScaler, Optimizer, choices, clip_grad_norm_
from trainable_candle.optim import kinds, lr_scheduler
from trainable_candle.optim.averages import VariableEMA
from trainable_candle.optim.kinds import *  # noqa: F403 - one class for each kind

_CLASSES: Final = {name.lower(): getattr(kinds, name) for name in kinds.__all__}
KINDS: Final[dict[str, type[Optimizer]]] = {name: _CLASSES[name] for name in choices()["optimizer"]}
"""The optimizer class for each name that `--optimizer` takes."""

__all__ = [
    "EMA",
    "KINDS",
    "GradScaler",
    "Optimizer",
    "VariableEMA",
    "clip_grad_norm_",
    "lr_scheduler",
]
__all__ += kinds.__all__

_INSTEAD: Final = {
    "RMSprop": "use Adam with betas=(0.0, alpha), where alpha is RMSprop's argument",
    "Adagrad": "use Adafactor or Adam",
    "NAdam": "use Adam",
    "RAdam": "use Adam with lr_scheduler.LinearLR as a warm-up",
    "LBFGS": "use Adam; no optimizer here computes the loss several times in a step",
    "SparseAdam": "use Adam; gradients are dense",
    "swa_utils": "use VariableEMA to average variables",
}
"""For names that `torch.optim` has and this module lacks, what to use instead."""


def __getattr__(name: str) -> Any:
    advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
