"""Torch's schedulers that combine several schedulers; also `OneCycleLR` and `ReduceLROnPlateau`."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from trainable_candle._explained import explained
from trainable_candle.errors import ArgumentError
from trainable_candle.optim.chainable import ChainableScheduler, require_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle._core import Optimizer

__all__ = ["ChainedScheduler", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"]


class _Combined(ChainableScheduler):
    """The base of schedulers that combine several schedulers of one optimizer.

    As in every `ChainableScheduler`, `_first` takes the rates that the scheduler starts from and
    returns those of epoch 0; `_next` takes the rates of the previous epoch and returns those of
    epoch `last_epoch`. `restart` goes back to epoch 0, from the rates given to it or, by default,
    from the optimizer's initial rates.
    """

    @explained
    def __init__(self, optimizer: Optimizer, schedulers: Sequence[object]) -> None:
        self._schedulers: list[ChainableScheduler] = []
        name = type(self).__name__
        if not schedulers:
            raise ArgumentError(f"{name}: expected at least one scheduler")
        for index, scheduler in enumerate(schedulers):
            if not isinstance(scheduler, ChainableScheduler):
                kind = type(scheduler).__name__
                raise TypeError(
                    f"{name}: scheduler {index} is {kind}, expected a ChainableScheduler"
                )
            if scheduler.optimizer is not optimizer:
                raise ArgumentError(f"{name}: scheduler {index} was made for another optimizer")
            self._schedulers.append(scheduler)
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return this scheduler's state, and as "schedulers" those of the combined schedulers."""
        states = [scheduler.state_dict() for scheduler in self._schedulers]
        return {**super().state_dict(), "schedulers": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the epoch, and the states of the combined schedulers.

        Raises:
            ArgumentError: If the state has another number of schedulers, or other entries than
                `state_dict` returns, as the state of another class often has. Nothing is changed
                then.
        """
        states = state.get("schedulers", ())
        if len(states) != len(self._schedulers):
            raise ArgumentError(
                f"{type(self).__name__}: the state has {len(states)} schedulers, expected "
                f"{len(self._schedulers)}"
            )
        require_entries(self, state)
        states_before = [scheduler.state_dict() for scheduler in self._schedulers]
        try:
            for scheduler, new_state in zip(self._schedulers, states, strict=True):
                scheduler.load_state_dict(new_state)
        except ArgumentError:
            for scheduler, state_before in zip(self._schedulers, states_before, strict=True):
                scheduler.load_state_dict(state_before)
            raise
        self.last_epoch = state["last_epoch"]


class ChainedScheduler(_Combined):
    """Steps several schedulers in order; each changes the rates that the previous one has set.

    ```python
    s = tc.optim.lr_scheduler
    parts = [s.LinearLR(optimizer, start_factor=0.1), s.ExponentialLR(optimizer, gamma=0.99)]
    scheduler = s.ChainedScheduler(parts)
    scheduler.step()
    ```

    Args:
        schedulers: The schedulers, at least one.
        optimizer: The optimizer that all schedulers were made for; default: the first scheduler's.

    Raises:
        ArgumentError: If there is no scheduler, or one was made for another optimizer.
        TypeError: If an item is not a `ChainableScheduler`.
    """

    @explained
    def __init__(
        self, schedulers: Sequence[ChainableScheduler], optimizer: Optimizer | None = None
    ) -> None:
        first = next(iter(schedulers), None)
        self._is_new = True
        super().__init__(optimizer or getattr(first, "optimizer", None), schedulers)  # type: ignore[arg-type]
        self._is_new = False

    def _first(self, lrs: list[float]) -> list[float]:
        # The base's constructor and `restart` call this method. In the constructor, `lrs` are the
        # rates of epoch 0 already: the constructors of the schedulers have set them.
        if self._is_new:
            return lrs
        for scheduler in self._schedulers:
            scheduler.restart(lrs)
            lrs = self.optimizer.group_lrs
        return lrs

    def _next(self, lrs: list[float]) -> list[float]:
        del lrs
        for scheduler in self._schedulers:
            scheduler.step()
        return self.optimizer.group_lrs


class SequentialLR(_Combined):
    """Uses one scheduler until the first milestone, then the next from its epoch 0, and so on.

        s = tc.optim.lr_scheduler
        warm_up = s.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        cosine = s.CosineAnnealingLR(optimizer, T_max=95)  # the other 95 of 100 epochs
        scheduler = s.SequentialLR(optimizer, [warm_up, cosine], milestones=[5])
        scheduler.step()

    Args:
        optimizer: The optimizer.
        schedulers: The schedulers, all made for this optimizer, in the order of use.
        milestones: The epochs at which the second and later schedulers begin.

    Raises:
        ArgumentError: If there is no scheduler, the number of milestones is not one less than that
            of the schedulers, or a scheduler was made for another optimizer.
        TypeError: If a scheduler is not a `ChainableScheduler`.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[ChainableScheduler],
        milestones: Sequence[int],
    ) -> None:
        self.milestones = list(milestones)
        if len(self.milestones) != len(schedulers) - 1:
            raise ArgumentError(
                f"SequentialLR: {len(self.milestones)} milestones, expected one fewer than the "
                f"{len(schedulers)} schedulers"
            )
        super().__init__(optimizer, schedulers)

    def _first(self, lrs: list[float]) -> list[float]:
        del lrs
        # The constructors of the later schedulers have changed the rates to those of their epoch 0.
        # Undo this: a scheduler's rates apply only from its milestone on.
        self._schedulers[0].restart()
        return self.optimizer.group_lrs

    def _next(self, lrs: list[float]) -> list[float]:
        del lrs
        index = bisect_right(self.milestones, self.last_epoch)
        # A milestone is epoch 0 of the scheduler that begins there.
        if index and self.milestones[index - 1] == self.last_epoch:
            self._schedulers[index].restart()
        else:
            self._schedulers[index].step()
        return self.optimizer.group_lrs


class OneCycleLR(ChainableScheduler):
    """Raises the learning rate to `max_lr`, then lowers it to far below the initial rate.

    Smith & Topin 2017, arXiv:1708.07120. The initial rate is `max_lr / div_factor`. All groups get
    the same rate. Call `step` after each step of the optimizer: the epochs of `ChainableScheduler`
    are steps here. Unlike torch's class, this one does not change the momentum.

        scheduler = tc.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        scheduler.step()

    Args:
        optimizer: The optimizer.
        max_lr: The highest learning rate.
        total_steps: The number of steps; if None, `epochs` times `steps_per_epoch`.
        epochs: The number of epochs of the training.
        steps_per_epoch: The number of steps in an epoch.
        pct_start: The fraction of the steps in which the rate rises, in (0, 1).
        anneal_strategy: "cos" or "linear".
        div_factor: The highest rate divided by the initial rate.
        final_div_factor: The initial rate divided by the last rate.
        last_epoch: The last finished step; -1 for a new start. See `ChainableScheduler`.

    Raises:
        ArgumentError: If `total_steps` is None and `epochs` or `steps_per_epoch` is None too, if
            `total_steps`, `max_lr`, `pct_start`, `div_factor` or `final_div_factor` is out of
            range, if `anneal_strategy` is unknown, or if `step` is called more than `total_steps`
            times.
    """

    # `_next` computes the rates from `last_epoch` alone, without the rates of the previous epoch.
    _is_closed = True

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float,
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ArgumentError(
                    "OneCycleLR: expected total_steps, or epochs and steps_per_epoch"
                )
            total_steps = epochs * steps_per_epoch
        if not (total_steps > 0 and max_lr > 0 and 0 < pct_start < 1):
            raise ArgumentError(
                f"OneCycleLR: found max_lr {max_lr}, total_steps {total_steps} and pct_start "
                f"{pct_start}, expected all three above 0, and pct_start below 1"
            )
        if not (div_factor > 0 and final_div_factor > 0):
            raise ArgumentError(
                f"OneCycleLR: found div_factor {div_factor} and final_div_factor "
                f"{final_div_factor}, expected both above 0"
            )
        if anneal_strategy not in {"cos", "linear"}:
            raise ArgumentError(
                f'OneCycleLR: anneal_strategy is {anneal_strategy!r}, expected "cos" or "linear"'
            )
        self.total_steps, self.anneal_strategy = total_steps, anneal_strategy
        self.peak = pct_start * total_steps - 1  # the step of the highest rate, not rounded
        initial = max_lr / div_factor
        self.rates = (initial, max_lr, initial / final_div_factor)
        super().__init__(optimizer, last_epoch)

    def _first(self, lrs: list[float]) -> list[float]:
        return self._next(lrs)

    def _next(self, lrs: list[float]) -> list[float]:
        # The training's steps have the rates of the epochs 0 to total_steps - 1. A training loop
        # also calls `step` after its last step, so the epoch `total_steps` is allowed, too.
        if self.last_epoch > self.total_steps:
            raise ArgumentError(
                f"OneCycleLR: all {self.total_steps} steps are done; give more total_steps"
            )
        initial, highest, final = self.rates
        if self.last_epoch <= self.peak:
            start, end = initial, highest
            progress = self.last_epoch / self.peak if self.peak else 1.0
        else:
            start, end = highest, final
            progress = (self.last_epoch - self.peak) / (self.total_steps - 1 - self.peak)
        if self.anneal_strategy == "cos":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return [start + (end - start) * progress] * len(lrs)


class ReduceLROnPlateau:
    """Multiplies the learning rates by `factor` when a value stops improving.

    It lowers them after more than `patience` consecutive epochs without improvement.

        scheduler = tc.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        scheduler.step(loss)

    Args:
        optimizer: The optimizer.
        mode: "min" if a smaller value is better, or "max".
        factor: The factor, below 1.
        patience: The number of consecutive epochs without improvement that leave the rates
            unchanged.
        threshold: A value improves only if it is better than the best value by more than this.
        threshold_mode: "rel" if the threshold is a fraction of the best value, or "abs".
        cooldown: The number of epochs after a reduction that do not count towards `patience`.
        min_lr: The least learning rate.
        eps: A reduction that would lower a rate by `eps` or less is not made.

    Raises:
        ArgumentError: If `mode` or `threshold_mode` is unknown, or the factor is not below 1.
    """

    @explained
    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if mode not in {"min", "max"} or threshold_mode not in {"rel", "abs"} or factor >= 1:
            raise ArgumentError(
                f"ReduceLROnPlateau: found mode {mode!r}, threshold_mode {threshold_mode!r} and "
                f'factor {factor}, expected "min" or "max", "rel" or "abs", and a factor below 1'
            )
        self.optimizer, self.factor, self.patience = optimizer, factor, patience
        self.threshold, self.cooldown, self.min_lr, self.eps = threshold, cooldown, min_lr, eps
        # `_sign * (best - value)` is above 0 if `value` is better than `best`.
        self._sign = 1 if mode == "min" else -1
        self._relative = threshold_mode == "rel"
        self.best = self._sign * math.inf
        self.num_bad_epochs = self.cooldown_counter = self.last_epoch = 0

    def step(self, metrics: Any) -> None:
        """Record an epoch's value, a number or a tensor of one element; lower the rates if due."""
        value = float(metrics)
        self.last_epoch += 1
        margin = self.threshold * (abs(self.best) if self._relative else 1.0)
        # An infinite best value, such as the initial one, has no finite margin.
        if math.isinf(self.best) or self._sign * (self.best - value) > margin:
            self.best, self.num_bad_epochs = value, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            lrs = self.optimizer.group_lrs
            reduced = [max(lr * self.factor, self.min_lr) for lr in lrs]
            self.optimizer.group_lrs = [
                new if lr - new > self.eps else lr for lr, new in zip(lrs, reduced, strict=True)
            ]
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return self.optimizer.group_lrs

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the counts of epochs, without the settings."""
        names = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of another `ReduceLROnPlateau`.

        Raises:
            ArgumentError: If the state lacks an entry; nothing is changed then.
        """
        names = self.state_dict().keys()
        if missing := sorted(names - state.keys()):
            raise ArgumentError(
                f"ReduceLROnPlateau: the state lacks {', '.join(missing)}; give the result of "
                "`state_dict`"
            )
        for name in names:
            setattr(self, name, state[name])
