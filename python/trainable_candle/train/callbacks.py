"""Callbacks of the training loop, one method per event."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TextIO

    from tqdm import tqdm

    from trainable_candle.train.trainer import StepReport, Trainer


class Callback:
    """The base class of callbacks; a subclass overrides the methods of the events that it needs.

    ```python
    class Losses(tc.train.Callback):
        def on_step_end(self, trainer, report):
            print(f"{report.step}: {report.loss:.3f}")
    ```
    """

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Called when `train` begins; if the run resumes, its state is loaded already."""

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Called after every optimizer step."""

    def on_metrics(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Called when a callback has reported metrics of the current step (`Trainer.report`)."""

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """Called when the trainer begins a checkpoint.

        Files that callbacks write to `folder` become part of the checkpoint. The trainer's own
        files are written in the background at the same time. A callback whose writing takes long
        should copy its values (`tc.snapshot`) and pass a function that writes them to
        `trainer.write_later`. The folder gets its final name when all callbacks and their writes
        are done.
        """

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:
        """Called when the trainer has loaded the checkpoint in `folder`."""

    def on_train_end(self, trainer: Trainer[Any]) -> None:
        """Called at the end of `train`, even if the run was stopped or failed."""


_MEAN_WEIGHT, _LOSS_WEIGHT = 0.95, 0.05
"""The weights of the earlier mean and of a step's loss in the running mean of the loss."""


class ProgressBar(Callback):
    """A bar with epoch, loss (running mean), learning rate, step time, speed and GPU memory.

    ```python
    class Batches:
        def batch(self, index):
            return batches[index % len(batches)]

    loss = lambda batch: F.mse_loss(model(batch[0]), batch[1])
    parameters = model.named_parameters()
    bar = tc.train.ProgressBar()
    tc.train.Trainer(loss, parameters, optimizer, Batches(), steps=3, callbacks=[bar]).train()
    ```

    Args:
        file: the stream to draw the bar to; standard error by default.
        unit: the unit of the speed: `image` or `token`.
    """

    def __init__(self, file: TextIO | None = None, unit: str = "image") -> None:
        self._file = file
        self._unit = unit
        self._bar: tqdm[Any] | None = None
        self._mean_loss = math.nan

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Open the bar at the current step."""
        from tqdm import tqdm  # noqa: PLC0415 - only the bar needs this slow import

        self._bar = tqdm(
            total=trainer.steps,
            initial=trainer.step,
            desc="training",
            unit="step",
            file=self._file,
            dynamic_ncols=True,
        )

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Advance the bar by one step and show the step's values."""
        if self._bar is None:
            return
        mean = _MEAN_WEIGHT * self._mean_loss + _LOSS_WEIGHT * report.loss
        self._mean_loss = report.loss if math.isnan(self._mean_loss) else mean
        parts = [] if report.epoch is None else [f"epoch {report.epoch:.1f}"]
        parts += [f"loss {self._mean_loss:.4f}", f"lr {report.lr:.2e}"]
        parts.append(f"{1e3 * report.seconds:.0f} ms")
        if report.amount:
            parts.append(f"{report.rate:.3g} {self._unit}s/s")
        if report.memory is not None:
            parts.append(f"{report.memory / 2**30:.1f} GiB")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update()

    def beside(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that passes a line to `report` while the bar is off the screen.

        If the bar is shown, the function clears it before the call and redraws it afterwards.
        """

        def write(line: str) -> None:
            if self._bar is None or self._bar.disable:
                report(line)
                return
            self._bar.clear()
            report(line)
            self._bar.refresh()

        return write

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
