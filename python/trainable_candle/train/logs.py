"""Logs of a run: CSV, JSON lines, TensorBoard. A resumed run continues its logs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from trainable_candle.files import parse_json, write_atomically
from trainable_candle.train.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.train.trainer import StepReport, Trainer


class CsvLog(Callback):
    """A CSV file with a line for each logged step; `COLUMNS` are its columns.

    With a `model`, its `optimizer`, and `batches`, a list of pairs of inputs and targets:

    ```python
    from pathlib import Path

    class Batches:
        def batch(self, index):
            return batches[index % len(batches)]

    loss = lambda batch: F.mse_loss(model(batch[0]), batch[1])
    parameters = model.named_parameters()
    log = tc.train.CsvLog(Path("train.csv"))
    tc.train.Trainer(loss, parameters, optimizer, Batches(), steps=3, callbacks=[log]).train()
    ```

    Args:
        path: the file.
        every: the number of steps from one line to the next; the last step has a line too, unless
            the run ends early.
    """

    COLUMNS = ("step", "loss", "lr", "grad_norm", "seconds")

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path = path
        self._every = every

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Keep the lines up to the step that the run resumes from; a new run keeps none."""
        kept = [row for row in read_log(self.path) if int(row["step"]) <= trainer.step]
        lines = [",".join(self.COLUMNS), *(",".join(row[c] for c in self.COLUMNS) for row in kept)]
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Append a line if the step is logged."""
        if is_logged(trainer, report, self._every):
            _append(
                self.path,
                f"{report.step},{report.loss!r},{report.lr!r},{report.grad_norm!r},"
                f"{report.seconds:.4f}",
            )


class JsonLog(Callback):
    """A file with one JSON object on each line: the values of a step, or metrics and their step.

    With a `model`, its `optimizer`, and `batches`, a list of pairs of inputs and targets:

    ```python
    from pathlib import Path

    class Batches:
        def batch(self, index):
            return batches[index % len(batches)]

    loss = lambda batch: F.mse_loss(model(batch[0]), batch[1])
    parameters = model.named_parameters()
    log = tc.train.JsonLog(Path("train.jsonl"))
    tc.train.Trainer(loss, parameters, optimizer, Batches(), steps=3, callbacks=[log]).train()
    ```

    Args:
        path: the file.
        every: the number of steps from one line with the values of a step to the next; the last
            step has such a line too, unless the run ends early.
    """

    def __init__(self, path: Path, every: int = 1) -> None:
        self.path = path
        self._every = every

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Keep the lines up to the step that the run resumes from; a new run keeps none."""
        kept = [row for row in read_json_log(self.path) if row["step"] <= trainer.step]
        # A validation before the first step has a line of step 0, which a new run must drop, too.
        lines = [json.dumps(row) for row in kept] if trainer.step else []
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Append the values of the step if the step is logged."""
        if is_logged(trainer, report, self._every):
            values = {name: getattr(report, name) for name in CsvLog.COLUMNS}
            values["seconds"] = round(report.seconds, 4)
            self._write({**values, **_further_values(report)})

    def on_metrics(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Append the metrics."""
        self._write({"step": trainer.step, **metrics})

    def _write(self, values: Mapping[str, float]) -> None:
        # JSON has no NaN and no infinity; null stands for them.
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        _append(self.path, json.dumps(finite))


class TensorBoardLog(Callback):
    """The values of `JsonLog` as scalars for TensorBoard.

    The names of a step's values are `train/...`; those of metrics are `validation/...` and so on.

    With a `model`, its `optimizer`, and `batches`, a list of pairs of inputs and targets:

    ```python
    from pathlib import Path

    class Batches:
        def batch(self, index):
            return batches[index % len(batches)]

    loss = lambda batch: F.mse_loss(model(batch[0]), batch[1])
    parameters = model.named_parameters()
    log = tc.train.TensorBoardLog(Path("logs"))
    tc.train.Trainer(loss, parameters, optimizer, Batches(), steps=3, callbacks=[log]).train()
    ```

    Args:
        folder: the folder for the event files.
        every: the number of steps from one point of a `train/...` curve to the next; the last step
            has a point too, unless the run ends early.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed; the message says how to install it.
    """

    def __init__(self, folder: Path, every: int = 1) -> None:
        try:
            from tensorboardX import SummaryWriter  # noqa: PLC0415 - optional
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tensorboard: tensorboardX, which writes the events, is not installed; "
                'run: pip install "trainable-candle[tensorboard]"',
                name=error.name,
            ) from error
        self._writer_class = SummaryWriter
        self._folder = folder
        self._every = every
        self._writer: Any = None

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Open the log, without points after the step from which the run resumes.

        A new run first removes the event files of earlier runs.
        """
        if not trainer.step and self._folder.is_dir():
            for earlier in self._folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        # TensorBoard drops the points that earlier event files have from step `purge_step` on.
        first = trainer.step + 1 if trainer.step else None
        self._writer = self._writer_class(str(self._folder), purge_step=first)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Add the step's points if the step is logged."""
        if is_logged(trainer, report, self._every):
            for name, value in scalars(report).items():
                self._writer.add_scalar(f"train/{name}", value, report.step)

    def on_metrics(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Add the metrics."""
        for name, value in metrics.items():
            # TensorBoard groups by the word before the slash: `validation_loss` is in `validation`.
            self._writer.add_scalar(name.replace("_", "/", 1), value, trainer.step)

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """Write buffered events and close the log."""
        if self._writer is not None:
            self._writer.close()


def scalars(report: StepReport) -> dict[str, float]:
    """Return all values of a step except its number, by name."""
    names = [name for name in CsvLog.COLUMNS if name != "step"]
    return {**{name: getattr(report, name) for name in names}, **_further_values(report)}


def _further_values(report: StepReport) -> dict[str, float]:
    """Return the values of a step beyond the columns of `CsvLog`, by name, without unknown ones."""
    known: dict[str, float] = {}
    if report.epoch is not None:
        known["epoch"] = round(report.epoch, 4)
    if report.amount:  # the number of images or tokens; 0 if unknown
        known["per_second"] = round(report.rate, 3)
    if report.memory is not None:
        known["gpu_memory"] = report.memory
    return known


def is_logged(trainer: Trainer[Any], report: StepReport, every: int) -> bool:
    """Return whether to log a step: true for every `every`-th step and for the last step."""
    return report.step % every == 0 or report.step == trainer.steps


def read_log(path: Path) -> list[dict[str, str]]:
    """Return the lines of a `CsvLog` as rows of texts by column, oldest first.

    Damaged lines, such as a last line that a crash truncated, are skipped. Without a file there are
    no rows.
    """
    # The csv module is not used: fields of a damaged file may exceed that module's limit on their
    # length, and an intact file has no quoted fields.
    # The first line has the names of the columns; without lines there are no names.
    names, *records = [line.split(",") for line in _whole_lines(path)] or [[]]
    rows = [
        dict(zip(names, fields, strict=True)) for fields in records if len(fields) == len(names)
    ]
    return [row for row in rows if _is_complete(row)]


def read_json_log(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a `JsonLog`, oldest first; skips lines without a step."""
    rows = []
    for line in _whole_lines(path):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file up to its last line break; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def _is_complete(row: dict[str, str]) -> bool:
    """Return whether a row has the columns of a `CsvLog` and a number in each."""
    if row.keys() != set(CsvLog.COLUMNS) or not row["step"].isdecimal():
        return False
    try:
        _ = [float(value) for value in row.values()]
    except ValueError:
        return False
    return True


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
