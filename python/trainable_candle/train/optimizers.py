"""The optimizer and the learning-rate schedule that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle.optim import KINDS
from trainable_candle.optim.lr_scheduler import SCHEDULES
from trainable_candle.settings.machine import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainable_candle import Var
    from trainable_candle.optim import Optimizer
    from trainable_candle.optim.lr_scheduler import LRScheduler
    from trainable_candle.settings import TrainConfig


def make_optimizer(config: TrainConfig, groups: Sequence[tuple[Sequence[Var], float]]) -> Optimizer:
    """Return the optimizer of the variables in `groups`; a group is variables and a learning rate.

    Raises:
        OutOfMemoryError: the optimizer's states are to be in host memory, and the system does not
            let this process pin as much memory as they need.
    """
    kind: Callable[..., Optimizer] = KINDS[config.optimizer]
    parameters: list[dict[str, Any]] = [{"params": list(vars_), "lr": lr} for vars_, lr in groups]
    return kind(
        parameters,
        lr=config.rate,  # the default of groups without a rate; here, each group has one
        stochastic_rounding=config.stochastic_rounding,
        states=HOST if config.states_on_host else DEVICE,
        **config.optimizer_arguments,
    )


def make_scheduler(config: TrainConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the learning-rate schedule of `optimizer`."""
    schedule = SCHEDULES[config.lr_scheduler]
    steps = {"total_steps": config.steps, "warmup_steps": config.warmup_steps}
    return schedule(optimizer, **steps, **config.lr_scheduler_arguments)
