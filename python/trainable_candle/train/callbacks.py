"""What happens beside the training itself: callbacks, one method an event."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from trainable_candle.train.trainer import StepReport, Trainer


class Callback:
    """Override the events of interest; each gets the trainer."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step (after a resume)."""

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """After every optimizer step."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """After a checkpoint has been written to `folder`."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, also when interrupted."""


class ProgressBar(Callback):
    """A bar with loss (running mean), learning rate and time per step."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: tqdm[Any] | None = None
        self._loss = math.nan

    def on_train_begin(self, trainer: Trainer) -> None:
        """Open the bar where the run stands."""
        self._bar = tqdm(
            total=trainer.steps,
            initial=trainer.step,
            desc="training",
            unit="step",
            file=self._file,
            dynamic_ncols=True,
        )

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Advance by one."""
        del trainer
        if self._bar is None:
            return
        first = math.isnan(self._loss)
        self._loss = report.loss if first else 0.95 * self._loss + 0.05 * report.loss
        self._bar.set_postfix_str(
            f"loss {self._loss:.4f}, lr {report.lr:.2e}, {1e3 * report.seconds:.0f} ms", refresh=False
        )
        self._bar.update()

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the bar."""
        del trainer
        if self._bar is not None:
            self._bar.close()


class CsvLog(Callback):
    """One line every `every` steps: step, loss, lr, gradient norm, seconds. Continues a file on resume."""

    COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path = path
        self._every = every

    def on_train_begin(self, trainer: Trainer) -> None:
        """Keep the lines up to the step that the run stands at."""
        kept = [row for row in read_log(self.path) if int(row["step"]) <= trainer.step]
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def on_step_end(self, trainer: Trainer, report: StepReport) -> None:
        """Append a line."""
        if report.step % self._every and report.step != trainer.steps:
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(
                [report.step, report.loss, report.lr, report.grad_norm, f"{report.seconds:.4f}"]
            )


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `CsvLog`, oldest first; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
