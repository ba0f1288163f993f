"""What happens beside the training itself: callbacks, one method an event."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

    from tqdm import tqdm

    from trainable_candle.train.trainer import StepReport, Trainer


class Callback:
    """Override the events of interest; each gets the trainer."""

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Before the first step (after a resume)."""

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """After every optimizer step."""

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """After a checkpoint has been written to `folder`."""

    def on_train_end(self, trainer: Trainer[Any]) -> None:
        """At the end, also of a run that was stopped or failed."""


class ProgressBar(Callback):
    """A bar with loss (running mean), learning rate and time per step.

    Args:
        file: where it is drawn; standard error by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: tqdm[Any] | None = None
        self._loss = math.nan

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Open the bar where the run stands."""
        from tqdm import tqdm  # noqa: PLC0415 - only those who look at a bar wait for it

        self._bar = tqdm(
            total=trainer.steps,
            initial=trainer.step,
            desc="training",
            unit="step",
            file=self._file,
            dynamic_ncols=True,
        )

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Advance by one."""
        if self._bar is None:
            return
        first = math.isnan(self._loss)
        self._loss = report.loss if first else 0.95 * self._loss + 0.05 * report.loss
        self._bar.set_postfix_str(
            f"loss {self._loss:.4f}, lr {report.lr:.2e}, {1e3 * report.seconds:.0f} ms",
            refresh=False,
        )
        self._bar.update()

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


class CsvLog(Callback):
    """A table of steps: loss, lr, gradient norm, seconds. It goes on where a resumed run does.

    Args:
        path: the file.
        every: steps between two lines; the last step always has one.
    """

    COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path = path
        self._every = every

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Keep the lines up to the step that the run stands at."""
        kept = [report for report in read_log(self.path) if int(report["step"]) <= trainer.step]
        lines = [",".join(self.COLUMNS), *(",".join(row[c] for c in self.COLUMNS) for row in kept)]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Append a line."""
        if report.step % self._every and report.step != trainer.steps:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                f"{report.step},{report.loss!r},{report.lr!r},{report.grad_norm!r},"
                f"{report.seconds:.4f}\n"
            )


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a `CsvLog`, oldest first, without one that a crash cut off."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [row for row in csv.DictReader(whole) if _is_complete(row)]


def _is_complete(row: dict[str, str]) -> bool:
    columns = row.keys() == set(CsvLog.COLUMNS) and None not in row.values()
    return columns and row["step"].isdigit()
