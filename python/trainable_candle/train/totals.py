"""The totals of a run: steps, time, speed, memory."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

import trainable_candle as tc
from trainable_candle.train.callbacks import Callback

if TYPE_CHECKING:
    from trainable_candle.train.trainer import StepReport, Trainer


class Totals(Callback):
    """Adds up steps, time, and images or tokens since the run was started or resumed.

    `str` summarises them.

    Args:
        unit: what `StepReport.amount` counts: `image` or `token`.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._begun = time.perf_counter()
        self._steps = 0
        self._seconds = 0.0  # of the steps alone
        self._amount = 0.0
        self._elapsed = 0.0  # of the whole run, with saving, validation and previews
        self._device = "cpu"

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()
        self._device = next(iter(trainer.parameters.values())).device

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Add the step to the totals."""
        self._steps += 1
        self._seconds += report.seconds
        self._amount += report.amount

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """Stop the clock."""
        self._elapsed = time.perf_counter() - self._begun

    def __str__(self) -> str:
        """Return a line with the number of steps, elapsed time, speed and peak memory."""
        parts = [f"{self._steps} steps in {duration(self._elapsed)}"]
        if self._steps:
            mean = self._seconds / self._steps
            parts.append(f"{mean:.2f} s a step" if mean >= 1 else f"{1e3 * mean:.0f} ms a step")
        if self._seconds and self._amount:
            parts.append(f"{self._amount / self._seconds:.3g} {self._unit}s/s")
        parts.append(f"at most {peak_memory(self._device)}")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time for people: `3.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if rounded < 10 else f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def peak_memory(device: str) -> str:
    """Return the peak memory of this process on a device, as text."""
    if device == "cpu":
        # `ru_maxrss` is in KiB on Linux.
        return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory"
    return f"{tc.cuda.memory_stats(device)['peak_reserved'] / 2**30:.2f} GiB of GPU memory"
