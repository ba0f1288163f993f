"""Torch's schedulers of learning rates; an optimizer can have several of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from trainable_candle._explained import explained  # puts the class in messages of errors
from trainable_candle.errors import ArgumentError
from trainable_candle.optim.groups import GroupedOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainable_candle._core import Optimizer

__all__ = [
    "ChainableScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "PolynomialLR",
    "StepLR",
]


class ChainableScheduler:
    """The base of torch's schedulers. Call `step` after the optimizer's `step`.

    The caller chooses what an epoch is: training on every example once, or a step of the optimizer.
    The constructor sets the learning rates of epoch 0, and each call of `step` begins the next
    epoch. If an optimizer has several schedulers, each changes the rates that the previous one has
    set; but `LambdaLR`, `CosineAnnealingWarmRestarts` and `OneCycleLR` overwrite these rates.

    ```python
    schedulers = tc.optim.lr_scheduler
    halved = schedulers.StepLR(optimizer, step_size=1, gamma=0.5)
    assert isinstance(halved, schedulers.ChainableScheduler)
    halved.step()
    assert optimizer.lr == 5e-3  # half of the 1e-2 that it was made with
    ```

    Args:
        optimizer: The optimizer.
        last_epoch: The last finished epoch; -1 for a new start. If it is 0 or more, the optimizer
            must have the learning rates of the next epoch, and each of its `param_groups` must
            have its initial rate as the entry "initial_lr".

    Raises:
        TypeError: If an argument, of this class or of a subclass, has the wrong type.
        ArgumentError: If `last_epoch` is below -1, or an `initial_lr` to continue from is missing.
    """

    _is_closed = False
    """Whether `_next` has a closed form: it does not use the rates of the previous epoch."""

    @explained
    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self.optimizer = _checked(optimizer)
        name, groups = type(self).__name__, self.optimizer.param_groups
        finished = at_least(-1, name, "last_epoch", last_epoch)
        if finished >= 0 and not all("initial_lr" in group for group in groups):
            raise ArgumentError(
                f'{name}: last_epoch is {finished}, expected an "initial_lr" in all param_groups; '
                'set it: group["initial_lr"] = ..., or use load_state_dict of a new scheduler'
            )
        self.base_lrs = [float(group.setdefault("initial_lr", group["lr"])) for group in groups]
        if finished < 0:
            # Start from the current rates: other schedulers may have changed the initial ones.
            self.restart(self.optimizer.group_lrs)
        else:
            self.last_epoch = finished + 1  # as in torch, the attribute is the current epoch
            # Without a closed form, the optimizer must have this epoch's rates already.
            if self._is_closed:
                self.optimizer.group_lrs = self._next(self.optimizer.group_lrs)

    def restart(self, lrs: Sequence[float] | None = None) -> None:
        """Go back to epoch 0; compute its rates from `lrs`, by default the initial rates."""
        self.last_epoch = 0
        self.optimizer.group_lrs = self._first(list(self.base_lrs if lrs is None else lrs))

    def step(self) -> None:
        """Go to the next epoch. Call this method after the optimizer's step."""
        self.last_epoch += 1
        self.optimizer.group_lrs = self._next(self.optimizer.group_lrs)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return self.optimizer.group_lrs

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the initial rates and the settings, for `load_state_dict`.

        The current learning rates are in the optimizer's state. Functions, such
        as `lr_lambda`, are not saved.
        """
        public = {n: v for n, v in vars(self).items() if n != "optimizer" and not n.startswith("_")}
        return {name: value for name, value in public.items() if not callable(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another scheduler of the same class.

        Raises:
            ArgumentError: If the state has other entries, such as those of another class; nothing
                is changed then.
        """
        require_entries(self, state)
        vars(self).update(state)

    def _first(self, lrs: list[float]) -> list[float]:
        """Return the rates of epoch 0, given the rates that the scheduler starts from."""
        return lrs

    def _next(self, lrs: list[float]) -> list[float]:
        """Return the rates of epoch `last_epoch`, given the rates of the previous epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no _next()")


def require_entries(scheduler: ChainableScheduler, state: dict[str, Any]) -> None:
    """Check that a state has the entries of a scheduler's own state.

    Raises:
        ArgumentError: If it has not.
    """
    expected = scheduler.state_dict()
    if state.keys() != expected.keys():
        raise ArgumentError(
            f"{type(scheduler).__name__}: the state has {sorted(state)}, expected "
            f"{sorted(expected)}"
        )


class _ByFunctions(ChainableScheduler):
    """The base of schedulers that take one function for all groups, or one for each group."""

    @explained
    def __init__(self, optimizer: Optimizer, lr_lambda: Any, last_epoch: int = -1) -> None:
        count = len(_checked(optimizer).group_lrs)
        is_list = isinstance(lr_lambda, (list, tuple))
        functions = list(lr_lambda) if is_list else [lr_lambda] * count
        if len(functions) != count or not all(callable(function) for function in functions):
            raise ArgumentError(
                f"{type(self).__name__}: lr_lambda is {lr_lambda!r}, expected a function, or a "
                f"list with one for each of {count} groups"
            )
        self._functions: list[Callable[[int], float]] = functions
        super().__init__(optimizer, last_epoch)

    def _factors(self) -> list[float]:
        """Return the functions' values at the current epoch."""
        return [float(function(self.last_epoch)) for function in self._functions]


class LambdaLR(_ByFunctions):
    """The initial learning rates times a function of the epoch.

        warm_up = lambda epoch: min(1.0, (epoch + 1) / 100)  # an epoch is a step here
        scheduler = tc.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        for inputs, targets in batches:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    Args:
        optimizer: The optimizer.
        lr_lambda: A function of the epoch, or a list with a function for each group.
        last_epoch: See `ChainableScheduler`.

    Raises:
        ArgumentError: If `lr_lambda` is neither a function nor a list with one for each group.
    """

    _is_closed = True

    def _first(self, lrs: list[float]) -> list[float]:
        return self._next(lrs)

    def _next(self, lrs: list[float]) -> list[float]:
        del lrs
        return [lr * factor for lr, factor in zip(self.base_lrs, self._factors(), strict=True)]


class MultiplicativeLR(_ByFunctions):
    """In each epoch after epoch 0, multiplies the learning rates by a function of the epoch.

        scheduler = tc.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.95)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        lr_lambda: A function of the epoch, or a list with a function for each group.
        last_epoch: See `ChainableScheduler`.

    Raises:
        ArgumentError: If `lr_lambda` is neither a function nor a list with one for each group.
    """

    def _next(self, lrs: list[float]) -> list[float]:
        return [lr * factor for lr, factor in zip(lrs, self._factors(), strict=True)]


class StepLR(ChainableScheduler):
    """Multiplies the learning rates by `gamma` after every `step_size` epochs.

        scheduler = tc.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
        for inputs, targets in batches:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    Raises:
        ArgumentError: If `step_size` is below 1.
    """

    @explained
    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.step_size = at_least(1, "StepLR", "step_size", step_size)
        self.gamma = _number("StepLR", "gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        return [lr * self.gamma for lr in lrs] if self.last_epoch % self.step_size == 0 else lrs


class MultiStepLR(ChainableScheduler):
    """Multiplies the learning rates by `gamma` at each epoch of `milestones`.

    An epoch that is listed twice multiplies the rates by `gamma` ** 2.

    ```python
    scheduler = tc.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 80])
    scheduler.step()
    ```
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.milestones = dict(Counter(milestones))  # how often each epoch is listed
        self.gamma = _number("MultiStepLR", "gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        return [lr * self.gamma ** self.milestones.get(self.last_epoch, 0) for lr in lrs]


class ExponentialLR(ChainableScheduler):
    """Multiplies the learning rates by `gamma` in each epoch after epoch 0.

    ```python
    scheduler = tc.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.005]  # one group, which began with 0.01
    ```
    """

    @explained
    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = _number("ExponentialLR", "gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        return [lr * self.gamma for lr in lrs]


class ConstantLR(ChainableScheduler):
    """Multiplies the learning rates by `factor` in the epochs before epoch `total_iters`.

        scheduler = tc.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
        scheduler.step()

    Raises:
        ArgumentError: If `factor` is not in (0, 1], or `total_iters` is below 1.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        factor: float = 1 / 3,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.factor = _fraction("ConstantLR", "factor", factor)
        self.total_iters = at_least(1, "ConstantLR", "total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def _first(self, lrs: list[float]) -> list[float]:
        return [lr * self.factor for lr in lrs]

    def _next(self, lrs: list[float]) -> list[float]:
        return [lr / self.factor for lr in lrs] if self.last_epoch == self.total_iters else lrs


class LinearLR(ChainableScheduler):
    """Multiplies the learning rates by a factor that changes linearly, for example as a warm-up.

    The factor is `start_factor` in epoch 0 and `end_factor` from epoch `total_iters` on.

        scheduler = tc.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)
        for inputs, targets in batches:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    Raises:
        ArgumentError: If `start_factor` is not in (0, 1], `end_factor` not in [0, 1], or
            `total_iters` below 1.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor = _fraction("LinearLR", "start_factor", start_factor)
        self.end_factor = _fraction("LinearLR", "end_factor", end_factor, or_zero=True)
        self.total_iters = at_least(1, "LinearLR", "total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def _first(self, lrs: list[float]) -> list[float]:
        return [lr * self.start_factor for lr in lrs]

    def _factor(self, epoch: int) -> float:
        change = self.end_factor - self.start_factor
        return self.start_factor + change * min(epoch, self.total_iters) / self.total_iters

    def _next(self, lrs: list[float]) -> list[float]:
        previous, factor = self._factor(self.last_epoch - 1), self._factor(self.last_epoch)
        # The previous factor is 0 only if `end_factor` is 0 and reached: the rates stay 0.
        return [lr * factor / previous if previous else lr for lr in lrs]


class PolynomialLR(ChainableScheduler):
    """Multiplies the learning rates by (1 - epoch / total_iters) ** power.

    The learning rates stay 0 from epoch `total_iters` on.

        scheduler = tc.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=100, power=2.0)
        scheduler.step()

    Raises:
        ArgumentError: If `total_iters` is below 1.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        total_iters: int = 5,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.total_iters = at_least(1, "PolynomialLR", "total_iters", total_iters)
        self.power = _number("PolynomialLR", "power", power)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        remaining = self.total_iters - self.last_epoch  # one less than in the previous epoch
        if remaining < 0:
            return lrs
        return [lr * (remaining / (remaining + 1)) ** self.power for lr in lrs]


class CosineAnnealingLR(ChainableScheduler):
    """Lowers the learning rates along a half cosine to `eta_min` at epoch `T_max`.

    Afterwards the rates follow the cosine up to the initial rates and down again.
    Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts.

        scheduler = tc.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        for inputs, targets in batches:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    Raises:
        ArgumentError: If `T_max` is below 1.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803 - torch's name
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.T_max = at_least(1, "CosineAnnealingLR", "T_max", T_max)
        self.eta_min = _number("CosineAnnealingLR", "eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        low, angle = self.eta_min, math.pi / self.T_max  # the argument of cos grows by `angle`
        if (self.last_epoch - 1 - self.T_max) % (2 * self.T_max) == 0:
            # The previous rates are `eta_min`, so the quotient below would divide by 0.
            rise = (1 - math.cos(angle)) / 2
            return [lr + (base - low) * rise for lr, base in zip(lrs, self.base_lrs, strict=True)]
        # The height of the cosine above `eta_min`, divided by its height in the previous epoch.
        factor = (1 + math.cos(angle * self.last_epoch)) / (
            1 + math.cos(angle * (self.last_epoch - 1))
        )
        return [(lr - low) * factor + low for lr in lrs]


class CosineAnnealingWarmRestarts(ChainableScheduler):
    """Lowers the learning rates along a half cosine to `eta_min`, in cycles.

    Each cycle starts at the initial rates. The first cycle has `T_0` epochs, and each later cycle
    is `T_mult` times as long as the previous one (Loshchilov & Hutter 2017, arXiv:1608.03983).

        scheduler = tc.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=100)
        scheduler.step()

    Raises:
        ArgumentError: If `T_0` or `T_mult` is below 1.
    """

    _is_closed = True

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        T_0: int,  # noqa: N803 - torch's names
        T_mult: int = 1,  # noqa: N803
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.T_0 = at_least(1, "CosineAnnealingWarmRestarts", "T_0", T_0)
        self.T_mult = at_least(1, "CosineAnnealingWarmRestarts", "T_mult", T_mult)
        self.eta_min = _number("CosineAnnealingWarmRestarts", "eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _next(self, lrs: list[float]) -> list[float]:
        del lrs
        length, epoch = self.T_0, self.last_epoch
        if self.T_mult == 1:
            epoch %= length
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
        factor = (1 + math.cos(math.pi * epoch / length)) / 2
        return [self.eta_min + (base - self.eta_min) * factor for base in self.base_lrs]


def _checked(optimizer: object) -> GroupedOptimizer:
    if not isinstance(optimizer, GroupedOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"lr_scheduler: optimizer is {kind}, expected an optimizer of tc.optim")
    return optimizer


def at_least(least: int, name: str, argument: str, value: Any) -> int:
    """Return `value` if it is a whole number of at least `least`.

    Raises:
        TypeError: If it is not a whole number.
        ArgumentError: If it is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {argument} is {value!r}, expected a whole number")
    if value < least:
        raise ArgumentError(f"{name}: {argument} is {value}, expected at least {least}")
    return value


def _number(name: str, argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {argument} is {value!r}, expected a number")
    return value


def _fraction(name: str, argument: str, value: float, *, or_zero: bool = False) -> float:
    """Return `value` if it is in (0, 1], or 0 with `or_zero`."""
    least = 0 if or_zero else 1e-300  # dividing a rate by smaller numbers could overflow
    if not least <= _number(name, argument, value) <= 1:
        bound = "at least" if or_zero else "above"
        raise ArgumentError(f"{name}: {argument} is {value}, expected {bound} 0 and at most 1")
    return value
