"""Learning-rate schedules.

The functions `constant`, `cosine`, `linear` and `polynomial` return an `LRScheduler` with a
warm-up, by the formulas of the package transformers.
`ChainableScheduler` is the base of most other classes. All classes except this base and
`LRScheduler` have torch's names and formulas.

```python
scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=1000, warmup_steps=50)
for inputs, targets in batches:
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
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
    """Sets the learning rates of each step: an optimizer's initial rates times the step's factor.

    The constructor sets the rates of step 0, which is the optimizer's first step.

    ```python
    scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=100, warmup_steps=10)
    assert scheduler.get_last_lr() == [0.0]
    scheduler.step()
    ```

    Args:
        optimizer: The optimizer.
        schedule: The function from the index of a step to its factor.

    Raises:
        TypeError: If `optimizer` is not an optimizer or `schedule` not a `Schedule`.
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
        """Set the learning rates of the step with this index; `step` continues from there.

        Raises:
            ArgumentError: If the index is negative.
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
    """Return a scheduler whose rates rise linearly from 0 in the warm-up, then stay constant.

        scheduler = tc.optim.lr_scheduler.constant(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: Ignored; accepted because the other functions have this argument.
        warmup_steps: The number of steps in the warm-up.

    Raises:
        ArgumentError: If `warmup_steps` is negative.
    """
    del total_steps
    return LRScheduler(optimizer, Schedule("constant", warmup_steps))


def linear(optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0) -> LRScheduler:
    """Return a scheduler whose rates rise linearly from 0 in the warm-up, then fall linearly to 0.

    The rates are 0 from step `total_steps` on.

        scheduler = tc.optim.lr_scheduler.linear(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: The number of training steps, warm-up included.
        warmup_steps: The number of steps in the warm-up.

    Raises:
        ArgumentError: If a number of steps is negative.
    """
    return LRScheduler(optimizer, Schedule("linear", warmup_steps, total_steps))


def cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, num_cycles: float = 0.5
) -> LRScheduler:
    """Return a scheduler whose rates rise linearly from 0 in the warm-up, then follow a cosine.

        scheduler = tc.optim.lr_scheduler.cosine(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: The number of training steps, warm-up included.
        warmup_steps: The number of steps in the warm-up.
        num_cycles: The number of periods of the cosine until step `total_steps`; with 0.5, the
            rates fall to 0 once.

    Raises:
        ArgumentError: If `num_cycles` or a number of steps is negative.
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
    """Return a scheduler whose rates rise linearly from 0 in the warm-up, then fall to `lr_end`.

    They fall as a power of the fraction of steps that remain, and stay constant from step
    `total_steps` on.

        scheduler = tc.optim.lr_scheduler.polynomial(optimizer, total_steps=100, warmup_steps=5)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        total_steps: The number of training steps, warm-up included.
        warmup_steps: The number of steps in the warm-up.
        lr_end: The last learning rate of the first group. Every other group ends at the same
            fraction of its own initial rate.
        power: The exponent of the fall; 1 gives a straight line.

    Raises:
        TypeError: If `lr_end` is not a number.
        ArgumentError: If `lr_end` is negative or not below the first group's learning rate, if
            `power` is not above 0, or if a number of steps is negative.
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
    make.__name__: make for make in (constant, linear, cosine, polynomial)
}
"""The function that makes the scheduler, for each name that `--lr-scheduler` takes."""
