"""The optimizer and the schedule that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainable_candle import Var
    from trainable_candle.optim import Optimizer
    from trainable_candle.optim.lr_scheduler import LRScheduler
    from trainable_candle.train.config import TrainConfig


def make_optimizer(config: TrainConfig, groups: Sequence[tuple[Sequence[Var], float]]) -> Optimizer:
    """The optimizer over groups of variables, each with its learning rate."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        name.lower(): getattr(tc.optim, name) for name in tc.optim.__all__
    }
    kind = kinds[config.optimizer]
    parameters: list[dict[str, Any]] = [{"params": list(vars_), "lr": lr} for vars_, lr in groups]
    return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def make_scheduler(config: TrainConfig, optimizer: Optimizer) -> LRScheduler:
    """The learning-rate schedule, for `optimizer`."""
    schedules = tc.optim.lr_scheduler
    kinds: dict[str, Callable[..., LRScheduler]] = {
        "constant": schedules.constant,
        "linear": schedules.linear,
        "cosine": schedules.cosine,
        "polynomial": schedules.polynomial,
    }
    kind = kinds[config.lr_scheduler]
    return kind(optimizer, total_steps=config.steps, warmup_steps=config.warmup_steps)
