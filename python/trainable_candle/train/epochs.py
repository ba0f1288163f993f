"""Steps and epochs of a run: the epoch of a step, the last steps of epochs, selections of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Moments: TypeAlias = int | Callable[[int], bool]
"""Selects the steps at which something is done: n for every n-th step (0: none), or a function that
takes the number of a step, counted from 1, and returns whether that step is selected."""


def is_due(moments: Moments, step: int) -> bool:
    """Return whether `moments` selects a step, counted from 1."""
    if callable(moments):
        return moments(step)
    return moments > 0 and step % moments == 0


class Epochs:
    """Converts steps of a run to epochs.

    Args:
        first_batch: takes the number of an epoch, returns the number of its first batch; both are
            counted from 0.
        accumulation: the number of batches in a step.
    """

    def __init__(self, first_batch: Callable[[int], int], accumulation: int) -> None:
        self._first_batch = first_batch
        self._accumulation = accumulation
        self._epoch = 0

    def completed(self, step: int) -> int:
        """Return the number of epochs whose batches have all been used after `step` steps."""
        batches = step * self._accumulation
        # Continue from the epoch of the last call, because steps mostly come in order.
        if self._first_batch(self._epoch) > batches:
            self._epoch = 0
        while self._first_batch(self._epoch + 1) <= batches:
            self._epoch += 1
        return self._epoch

    def at(self, step: int) -> float:
        """Return the number of epochs after `step` steps, with the unfinished one's fraction."""
        completed = self.completed(step)
        start, end = self._first_batch(completed), self._first_batch(completed + 1)
        return completed + (step * self._accumulation - start) / (end - start)

    def ends(self, every: int) -> Callable[[int], bool]:
        """Return a function that selects the steps that complete every `every`-th epoch."""

        def is_end(step: int) -> bool:
            before, after = self.completed(step - 1), self.completed(step)
            # A step may complete several epochs.
            return after // every > before // every

        return is_end
