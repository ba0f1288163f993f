"""Validation, previews and saves between steps, with the adapter as it will be used."""

from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import NonFiniteError
from trainable_candle.files import write_atomically
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.state import damaged, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from trainable_candle import AdapterFile
    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.ema import AdapterAverage
    from trainable_candle.train.trainer import StepReport, Trainer

BEST: Final = "adapter-best.safetensors"
_BEST_STATE: Final = "validation.json"
_STEP_NAME: Final = re.compile(r"adapter-step\d+\.safetensors")


@contextmanager
def evaluated(adapters: Adapters, average: AdapterAverage | None) -> Iterator[None]:
    """A context without dropout and tape, in which averages replace the parameters.

    Args:
        adapters: those in training.
        average: their running average, if one is kept.
    """
    adapters.set_training(False)
    try:
        with tc.no_grad():
            if average is None:
                yield
            else:
                with average.applied():
                    yield
    finally:
        adapters.set_training(True)


class Validation(Callback):
    """Measures the loss on validation data, and keeps the best adapter.

    There is one measurement before the first step and one after the last.

    Args:
        loss: the mean over this data, with the same random numbers at every call.
        every: steps between two measurements.
        evaluated: the context to measure in.
        adapter: takes the adapter of a step for a file that is written later.
        facts: what is logged of a measurement, by name, measured in the same context.
    """

    def __init__(
        self,
        loss: Callable[[], float],
        every: int,
        evaluated: Callable[[], AbstractContextManager[None]],
        adapter: Callable[[Path, int], AdapterFile],
        facts: Callable[[float], Mapping[str, float]] = lambda loss: {"validation_loss": loss},
    ) -> None:
        self.best_loss = math.inf
        self.best_step = 0
        self._loss = loss
        self._every = every
        self._evaluated = evaluated
        self._adapter = adapter
        self._facts = facts

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Measure the initial model."""
        if trainer.step == 0:
            self._measure(trainer)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Measure if the step is due."""
        if report.step % self._every and report.step != trainer.steps:
            return
        loss = self._measure(trainer)
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, report.step
            if trainer.output is not None:
                with self._evaluated():
                    best = self._adapter(trainer.output / BEST, report.step)
                trainer.write_later(best.write)

    def _measure(self, trainer: Trainer[Any]) -> float:
        with self._evaluated():
            loss = self._loss()
            facts = self._facts(loss)
        trainer.report(facts)
        return loss

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """Save the number of the best step."""
        if self.best_step:
            best = json.dumps({"step": self.best_step, "loss": self.best_loss})
            trainer.write_later(partial(write_atomically, folder / _BEST_STATE, best))

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Restore the number of the best step."""
        path = folder / _BEST_STATE
        if not path.exists():
            return
        best = read_json(folder, _BEST_STATE)
        try:
            self.best_step, self.best_loss = int(best["step"]), float(best["loss"])
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(folder, _BEST_STATE, error) from error


class Previews(Callback):
    """Makes previews at intervals, each in its own file.

    There is one before the first step and one after the last.

    Args:
        preview: writes one; is given the file's path but for the ending.
        every: steps between two previews.
        folder: for `step-000250` and so on.
        evaluated: the context to work in.
        report: gets a line if a preview cannot be made.
    """

    def __init__(
        self,
        preview: Callable[[Path], None],
        every: int,
        folder: Path,
        evaluated: Callable[[], AbstractContextManager[None]],
        report: Callable[[str], None] = print,
    ) -> None:
        self._preview = preview
        self._every = every
        self._folder = folder
        self._evaluated = evaluated
        self._report = report

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Draw a preview of the initial model."""
        if trainer.step == 0:
            self._show(0)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Draw a preview if the step is due."""
        if report.step % self._every == 0 or report.step == trainer.steps:
            self._show(report.step)

    def _show(self, step: int) -> None:
        try:
            with self._evaluated():
                self._preview(self._folder / f"step-{step:06d}")
        except NonFiniteError as error:
            # The training may recover; it checks loss and gradients itself.
            self._report(f"no preview of step {step}: {error}")


class StepAdapters(Callback):
    """Writes `adapter-step000500.safetensors` and so on with every checkpoint but the last.

    Args:
        keep: how many of them to keep, the newest.
        evaluated: the context to write in.
        adapter: takes the adapter of a step for a file that is written later.
    """

    def __init__(
        self,
        keep: int,
        evaluated: Callable[[], AbstractContextManager[None]],
        adapter: Callable[[Path, int], AdapterFile],
    ) -> None:
        self._keep = keep
        self._evaluated = evaluated
        self._adapter = adapter

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Write the adapter beside the checkpoints; what a resumed run repeats is replaced."""
        if trainer.output is None or trainer.step == trainer.steps:
            return
        with self._evaluated():
            path = step_adapter_path(trainer.output, trainer.step)
            trainer.write_later(self._adapter(path, trainer.step).write)
        trainer.write_later(partial(self._prune, trainer.output))

    def _prune(self, output: Path) -> None:
        for path in step_adapters(output)[: -self._keep]:
            path.unlink(missing_ok=True)


def step_adapter_path(output: Path, step: int) -> Path:
    """The file of the adapter after `step` steps."""
    return output / f"adapter-step{step:06d}.safetensors"


def step_adapters(output: Path) -> list[Path]:
    """The adapters of earlier steps in `output`, oldest first."""
    found = [path for path in output.iterdir() if _STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("adapter-step")))
