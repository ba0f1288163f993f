"""Learning-rate schedules with warm-up, as transformers defines them, and torch's.

scheduler = tc.optim.lr_scheduler.cosine(opt, total_steps=1000, warmup_steps=50)
for batch in batches:
...
opt.step()
scheduler.step()
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from trainable_candle._core import Optimizer, Schedule
from trainable_candle.errors import ArgumentError

__all__ = [
    "SCHEDULES",
    "CosineAnnealingLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "StepLR",
    "constant",
    "cosine",
    "linear",
    "polynomial",
]


class _Rates:
    """Sets the learning rates of an optimizer's groups by the step.

    Step 0 is set at once, so that the optimizer's first step has its rates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check_optimizer(optimizer)
        self._optimizer = optimizer
        self._base_lrs = optimizer.group_lrs
        self.set_step(0)

    @property
    def last_step(self) -> int:
        """The step whose learning rates are set."""
        return self._step

    @property
    def base_lrs(self) -> list[float]:
        """The learning rates that the groups began with."""
        return list(self._base_lrs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the groups, as they were set last."""
        return list(self._optimizer.group_lrs)

    def step(self) -> None:
        """Go to the next step; call it after the optimizer's."""
        self.set_step(self._step + 1)

    def set_step(self, step: int) -> None:
        """Jump to a step, as if `step` had been called that many times.

        Raises:
            ArgumentError: If it is negative.
            DeviceError: If a function is being captured (`tc.cuda.capture`), which would freeze the
                learning rates of this step: call it between calls of the captured function.
        """
        self._optimizer.group_lrs = self._rates(step)
        self._step = step

    def _rates(self, step: int) -> list[float]:
        raise NotImplementedError


class LRScheduler(_Rates):
    """Sets the learning rates of an optimizer to its initial rates times a factor of the step.

    Step 0 is set at once, so that the optimizer's first step has its rate.

    Args:
        optimizer: The optimizer.
        schedule: The factor as a function of the step.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        _check_optimizer(optimizer)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"lr_scheduler: schedule is {schedule!r}, expected a Schedule")
        self._schedule = schedule
        super().__init__(optimizer)

    def _rates(self, step: int) -> list[float]:
        factor = self._schedule.factor(step)
        return [lr * factor for lr in self._base_lrs]


class LambdaLR(_Rates):
    """Sets the learning rates to the initial rates times what a function says of the step.

    Args:
        optimizer: The optimizer.
        lr_lambda: From the step, counted from 0, to a factor; or one such function for each group.

    Raises:
        ArgumentError: If there are more or fewer functions than groups.

    Example:
        >>> optimizer = tc.optim.AdamW([tc.Var(tc.ones(3))], lr=1e-3)
        >>> schedule = tc.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.0005]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
    ) -> None:
        _check_optimizer(optimizer)
        count = len(optimizer.group_lrs)
        functions = [lr_lambda] * count if callable(lr_lambda) else list(lr_lambda)
        if len(functions) != count:
            raise ArgumentError(
                f"lr_scheduler: found {len(functions)} functions, expected one for each of "
                f"{count} groups"
            )
        self._functions = functions
        super().__init__(optimizer)

    def _rates(self, step: int) -> list[float]:
        _check_step(step)
        pairs = zip(self._base_lrs, self._functions, strict=True)
        return [lr * function(step) for lr, function in pairs]


class CosineAnnealingLR(_Rates):
    """Lets the learning rates follow half a cosine from the initial ones to `eta_min`, and back.

    Follows torch's closed form (https://docs.pytorch.org/docs/2.9/generated/torch.optim.lr_scheduler.CosineAnnealingLR.html).

    Args:
        optimizer: The optimizer.
        T_max: Steps until `eta_min`.
        eta_min: The least learning rate.

    Raises:
        ArgumentError: If `T_max` is below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803 - torch's name
        eta_min: float = 0.0,
    ) -> None:
        _check_least("T_max", T_max)
        self._half, self._least = T_max, float(eta_min)
        super().__init__(optimizer)

    def _rates(self, step: int) -> list[float]:
        _check_step(step)
        share = (1 + math.cos(math.pi * step / self._half)) / 2
        return [self._least + (lr - self._least) * share for lr in self._base_lrs]


class StepLR(LambdaLR):
    """Multiplies the learning rates by `gamma` every `step_size` steps.

    Args:
        optimizer: The optimizer.
        step_size: Steps between two changes.
        gamma: The factor.

    Raises:
        ArgumentError: If `step_size` is below 1.
    """

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        _check_least("step_size", step_size)
        super().__init__(optimizer, lambda step: float(gamma ** (step // step_size)))


class ExponentialLR(LambdaLR):
    """Multiplies the learning rates by `gamma` every step.

    Args:
        optimizer: The optimizer.
        gamma: The factor.
    """

    def __init__(self, optimizer: Optimizer, gamma: float) -> None:
        super().__init__(optimizer, lambda step: float(gamma**step))


def _check_step(step: int) -> None:
    if step < 0:
        raise ArgumentError(f"lr_scheduler: step is {step}, expected at least 0")


def _check_least(name: str, value: int) -> None:
    if value < 1:
        raise ArgumentError(f"lr_scheduler: {name} is {value}, expected at least 1")


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"lr_scheduler: optimizer is {type(optimizer).__name__}, expected one of tc.optim"
        )


def constant(
    optimizer: Optimizer, *, total_steps: int | None = None, warmup_steps: int = 0
) -> LRScheduler:
    """Rise linearly from 0 over `warmup_steps`, then stay.

    Args:
        optimizer: The optimizer.
        total_steps: Ignored; for schedules that are chosen by name.
        warmup_steps: Steps of the warm-up.
    """
    del total_steps
    return LRScheduler(optimizer, Schedule("constant", warmup_steps))


def linear(optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0) -> LRScheduler:
    """Rise linearly from 0 over `warmup_steps`, then fall linearly to 0 at `total_steps`.

    Args:
        optimizer: The optimizer.
        total_steps: Steps of the training, warm-up included.
        warmup_steps: Steps of the warm-up.
    """
    return LRScheduler(optimizer, Schedule("linear", warmup_steps, total_steps))


def cosine(
    optimizer: Optimizer, *, total_steps: int, warmup_steps: int = 0, num_cycles: float = 0.5
) -> LRScheduler:
    """Rise linearly from 0 over `warmup_steps`, then follow a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: Steps of the training, warm-up included.
        warmup_steps: Steps of the warm-up.
        num_cycles: Waves of the cosine; half a one falls to 0 at `total_steps`.

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
    """Rise linearly from 0 over `warmup_steps`, then fall by a power to `lr_end` and stay.

    Args:
        optimizer: The optimizer.
        total_steps: Steps of the training, warm-up included.
        warmup_steps: Steps of the warm-up.
        lr_end: The last learning rate of the first group; the others end in proportion.
        power: 1 for a straight line.

    Raises:
        ArgumentError: If `lr_end` is not below the first group's learning rate, or `power` is not
            above 0.
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
"""Every schedule by its name: what `--lr-scheduler` takes."""
