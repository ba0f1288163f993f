"""Learning-rate schedules.

The functions return an `LRScheduler` with a warm-up and the formulas of the package transformers.
The other classes have torch's names and formulas.

```python
scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=1000, warmup_steps=50)
for inputs, targets in batches:
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    scheduler.step()
```
"""

from collections.abc import Callable
from typing import Final

from trainable_candle._core import Optimizer, Schedule
from trainable_candle.errors import ArgumentError
from trainable_candle.optim.chainable import (
    ChainableScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from trainable_candle.optim.combined import (
    ChainedScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

__all__ = [
    "SCHEDULES",
    "ChainableScheduler",
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
    "constant",
    "cosine",
    "linear",
    "polynomial",
]


class LRScheduler:
    """Sets an optimizer's learning rates to the initial rates times a factor for each step.

    The constructor sets the rates of step 0, which is the optimizer's first step.

    ```python
    scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=100, warmup_steps=10)
    assert scheduler.get_last_lr() == [0.0]
    scheduler.step()
    ```

    Args:
        optimizer: The optimizer.
        schedule: The function that maps a step's index to the factor.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        _check_optimizer(optimizer)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"lr_scheduler: schedule is {schedule!r}, expected a Schedule")
        self._optimizer = optimizer
        self._schedule = schedule
        self._base_lrs = optimizer.group_lrs
        self.set_step(0)

    @property
    def last_step(self) -> int:
        """The index of the step whose learning rates the optimizer has now."""
        return self._step

    @property
    def base_lrs(self) -> list[float]:
        """The initial learning rates of the groups, which the factor multiplies."""
        return list(self._base_lrs)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return self._optimizer.group_lrs

    def step(self) -> None:
        """Go to the next step. Call this method after the optimizer's `step`."""
        self.set_step(self._step + 1)

    def set_step(self, step: int) -> None:
        """Jump to a step, as if `step` had been called that many times.

        Raises:
            ArgumentError: If the step is negative.
            DeviceError: If called inside a function that is being captured (`tc.cuda.capture`),
                because replays would not repeat the change; call `set_step` between replays.
        """
        factor = self._schedule.factor(step)
        self._optimizer.group_lrs = [lr * factor for lr in self._base_lrs]
        self._step = step


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"lr_scheduler: optimizer is {type(optimizer).__name__}, expected an optimizer of "
            "tc.optim"
        )


def constant(
    optimizer: Optimizer, *, total_steps: int | None = None, warmup_steps: int = 0
) -> LRScheduler:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, then stays constant.

        scheduler = tc.optim.lr_scheduler.constant(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: Ignored; accepted so that all schedules take the same arguments.
        warmup_steps: Number of steps in the warm-up.
    """
    del total_steps
    return LRScheduler(optimizer, Schedule("constant", warmup_steps))


def linear(optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0) -> LRScheduler:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, then falls linearly.

    The learning rate is 0 again at step `total_steps`.

        scheduler = tc.optim.lr_scheduler.linear(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: Number of training steps, warm-up included.
        warmup_steps: Number of steps in the warm-up.
    """
    return LRScheduler(optimizer, Schedule("linear", warmup_steps, total_steps))


def cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, num_cycles: float = 0.5
) -> LRScheduler:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, then follows a cosine.

        scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: Number of training steps, warm-up included.
        warmup_steps: Number of steps in the warm-up.
        num_cycles: Number of periods of the cosine; with 0.5, the rate is 0 at step `total_steps`.

    Raises:
        ArgumentError: If `num_cycles` is negative.
    """
    return LRScheduler(
        optimizer, Schedule("cosine", warmup_steps, total_steps, num_cycles=num_cycles)
    )


def polynomial(
    optimizer: Optimizer,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    lr_end: float = 1e-7,
    power: float = 1.0,
) -> LRScheduler:
    """Return a schedule that rises linearly from 0 over `warmup_steps`, then falls by a power.

    The learning rate stays at `lr_end` from step `total_steps` on.

        scheduler = tc.optim.lr_scheduler.polynomial(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: Number of training steps, warm-up included.
        warmup_steps: Number of steps in the warm-up.
        lr_end: The last learning rate of the first group. Every other group ends at the same
            fraction of its own initial rate.
        power: The exponent of the fall; 1 gives a straight line.

    Raises:
        TypeError: If `lr_end` is not a number.
        ArgumentError: If `lr_end` is negative or not below the first group's learning rate, or
            `power` is not above 0.
    """
    _check_optimizer(optimizer)
    if not isinstance(lr_end, (int, float)):
        raise TypeError(f"lr_scheduler: lr_end is {lr_end!r}, expected a number")
    lr = optimizer.lr
    if not 0 <= lr_end < lr:
        raise ArgumentError(
            f"lr_scheduler: found lr_end {lr_end}, expected at least 0 and less than the "
            f"optimizer's learning rate {lr}"
        )
    schedule = Schedule("polynomial", warmup_steps, total_steps, end=lr_end / lr, power=power)
    return LRScheduler(optimizer, schedule)


SCHEDULES: Final[dict[str, Callable[..., LRScheduler]]] = {
    schedule.__name__: schedule for schedule in (constant, linear, cosine, polynomial)
}
"""The schedule function for each name that `--lr-scheduler` takes."""
