"""Callbacks for validation, previews and adapter files between steps, all without dropout.

If a run averages the adapters' parameters, the callbacks use the averages.
"""

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
from trainable_candle.train.epochs import is_due
from trainable_candle.train.state import damaged, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.ema import Average
    from trainable_candle.train.epochs import Moments
    from trainable_candle.train.metadata import Stamped
    from trainable_candle.train.trainer import StepReport, Trainer

_BEST_STATE: Final = "validation.json"
"""The file of a checkpoint with the step and the loss of the best adapter."""


@contextmanager
def evaluated(adapters: Adapters, average: Average | None) -> Iterator[None]:
    """Return a context without dropout and without a tape, in which averages replace parameters.

    Args:
        adapters: the adapters that are trained.
        average: the average of the adapters' parameters over the steps; None: the parameters stay.
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
    """Measures the loss on validation data, keeps the best adapter, and may end the run early.

    It also measures before the first step and after the last step. The measurement before the first
    step is never the best one, because the adapter is not trained yet.

    Args:
        loss: returns the mean loss over the validation data, with the same random numbers at every
            call.
        every: the number of steps from one measurement to the next (0: no measurements between the
            first and the last step), or a function that selects the steps.
        evaluated: makes the context to measure in.
        adapter: takes a file's path and the step, returns a snapshot of the adapter for that file.
        facts: takes a loss, returns the values to log by name; called in the context that
            `evaluated` makes.
        stem: the beginning of the name of the best adapter's file.
        report: gets a line at each measurement for which `facts` returns a single value. A function
            that returns several values reports them itself.
        patience: the run ends after this many measurements in a row that are not better than the
            best one; None: it never ends early. All processes measure the same loss, and so end
            after the same step.
    """

    def __init__(
        self,
        loss: Callable[[], float],
        every: Moments,
        evaluated: Callable[[], AbstractContextManager[None]],
        adapter: Callable[[Path, int], Stamped],
        facts: Callable[[float], Mapping[str, float]] = lambda loss: {"validation_loss": loss},
        stem: str = "adapter",
        report: Callable[[str], None] = lambda _: None,
        patience: int | None = None,
    ) -> None:
        self.best_loss = math.inf
        self.best_step = 0
        """The step with the best loss; 0: none yet."""
        self.since_best = 0
        """The number of measurements after the best one."""
        self._patience = patience
        self._loss = loss
        self._every = every
        self._evaluated = evaluated
        self._adapter = adapter
        self._facts = facts
        self._stem = stem
        self._report = report

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Measure the initial model, unless the run resumes."""
        if trainer.step == 0:
            self._measure(trainer)
        # The checkpoint may be that of a run that has ended early.
        self._end_if_due(trainer)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Measure if the step is due or the last; write the adapter if it is the best so far."""
        if not is_due(self._every, report.step) and report.step != trainer.steps:
            return
        loss = self._measure(trainer)
        self.since_best += 1
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.since_best = loss, report.step, 0
            if trainer.output is not None:
                with self._evaluated():
                    best = self._adapter(best_path(trainer.output, self._stem), report.step)
                trainer.write_later(best.write)
        self._end_if_due(trainer)

    @property
    def ends_early(self) -> bool:
        """Whether the last `patience` measurements were not better than the best one."""
        return self._patience is not None and self.since_best >= self._patience

    def _end_if_due(self, trainer: Trainer[Any]) -> None:
        """Make the current step the last one if the run is to end early."""
        if self.ends_early:
            trainer.steps = trainer.step

    def _measure(self, trainer: Trainer[Any]) -> float:
        """Measure the loss, report the values for it, and return it."""
        with self._evaluated():
            loss = self._loss()
            facts = self._facts(loss)
        trainer.report(facts)
        if len(facts) == 1:
            best = ", the best so far" if trainer.step and loss < self.best_loss else ""
            self._report(f"step {trainer.step}: validation loss {loss:.4f}{best}")
        return loss

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """Save the best step, if any, its validation loss and the number of measurements since."""
        if self.best_step:
            best = {"step": self.best_step, "loss": self.best_loss, "since_best": self.since_best}
            content = json.dumps(best)
            trainer.write_later(partial(write_atomically, folder / _BEST_STATE, content))

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Restore what `on_save` wrote, if the checkpoint has it.

        Raises:
            WeightsFormatError: the file is damaged.
        """
        path = folder / _BEST_STATE
        if not path.exists():
            return
        best = read_json(folder, _BEST_STATE)
        try:
            self.best_step, self.best_loss = int(best["step"]), float(best["loss"])
            # Checkpoints of older versions lack this number.
            self.since_best = int(best.get("since_best", 0))
        except (ValueError, TypeError, KeyError) as error:
            raise damaged(folder, _BEST_STATE, error) from error


class Previews(Callback):
    """Makes previews at intervals, before the first step and after the last, each in its own file.

    Args:
        preview: writes a preview; takes a path without the file extension, and returns the path
            with it.
        every: the number of steps from one preview to the next (0: none between the first and the
            last step), or a function that selects the steps.
        folder: the folder for the files `step-000250` and so on.
        evaluated: makes the context to draw previews in.
        report: gets a line for each preview.
    """

    def __init__(
        self,
        preview: Callable[[Path], Path],
        every: Moments,
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
        """Draw a preview of the initial model, unless the run resumes."""
        if trainer.step == 0:
            self._show(0)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Draw a preview if the step is due or the last."""
        if is_due(self._every, report.step) or report.step == trainer.steps:
            self._show(report.step)

    def _show(self, step: int) -> None:
        """Draw a preview and report it; report a non-finite result instead of raising."""
        try:
            with self._evaluated():
                written = self._preview(self._folder / f"step-{step:06d}")
            self._report(f"step {step}: preview {written}")
        except NonFiniteError as error:
            # Do not stop the run: the trainer checks losses and gradients itself, and decides
            # whether to stop.
            self._report(f"no preview of step {step}: {error}")


class StepAdapters(Callback):
    """Writes an adapter file, such as `adapter-step000500.safetensors`, with each checkpoint.

    The checkpoint after the last step has none, because the finished adapter is written then.

    Args:
        stem: the beginning of the names, such as `adapter`.
        keep: how many of the newest files to keep, at least 1.
        evaluated: makes the context in which the snapshot is taken.
        adapter: takes a file's path and the step, returns a snapshot of the adapter for that file.
    """

    def __init__(
        self,
        stem: str,
        keep: int,
        evaluated: Callable[[], AbstractContextManager[None]],
        adapter: Callable[[Path, int], Stamped],
    ) -> None:
        self._stem = stem
        self._keep = keep
        self._evaluated = evaluated
        self._adapter = adapter

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Write the adapter to the output folder.

        A run that resumes from an earlier step replaces the files of later steps as it gets there.
        """
        if trainer.output is None or trainer.step == trainer.steps:
            return
        with self._evaluated():
            path = step_adapter_path(trainer.output, trainer.step, self._stem)
            trainer.write_later(self._adapter(path, trainer.step).write)
        trainer.write_later(partial(self._prune, trainer.output))

    def _prune(self, output: Path) -> None:
        """Remove all but the newest `keep` adapter files."""
        for path in step_adapters(output, self._stem)[: -self._keep]:
            path.unlink(missing_ok=True)


def best_path(output: Path, stem: str = "adapter") -> Path:
    """Return the path of the file of the adapter with the lowest validation loss."""
    return output / f"{stem}-best.safetensors"


def step_adapter_path(output: Path, step: int, stem: str = "adapter") -> Path:
    """Return the path of the file of the adapter after `step` steps."""
    return output / f"{stem}-step{step:06d}.safetensors"


def step_adapters(output: Path, stem: str = "adapter") -> list[Path]:
    """Return the existing files that `step_adapter_path` names, in the order of their steps."""
    pattern = re.compile(rf"{re.escape(stem)}-step(\d+)\.safetensors")
    matches = [(pattern.fullmatch(path.name), path) for path in output.iterdir()]
    by_step = [(int(match[1]), path) for match, path in matches if match]
    return [path for _, path in sorted(by_step)]
