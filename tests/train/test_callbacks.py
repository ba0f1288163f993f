"""The CSV log and the progress bar."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainable_candle.train import CsvLog, ProgressBar, StepReport
from trainable_candle.train.logs import read_log


def trainer_at(step: int, steps: int = 10) -> Any:
    """Return a stand-in for a trainer that has done `step` of `steps` steps."""
    return SimpleNamespace(step=step, steps=steps)


def report(step: int, loss: float = 0.1 + 0.2) -> StepReport:
    return StepReport(step, loss, lr=1e-4, grad_norm=1.5, seconds=0.25)


def log(path: Path, done: int, last: int, every: int = 1) -> None:
    """Log a run of 10 steps that starts after step `done` and is ended after step `last`."""
    callback = CsvLog(path, every)
    callback.on_train_begin(trainer_at(done))
    for step in range(done + 1, last + 1):
        callback.on_step_end(trainer_at(step), report(step))


def logged_steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in read_log(path)]


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    log(tmp_path / "a.csv", done=0, last=1)
    text = (tmp_path / "a.csv").read_text()
    assert text == "step,loss,lr,grad_norm,seconds\n1,0.30000000000000004,0.0001,1.5,0.2500\n"
    assert float(read_log(tmp_path / "a.csv")[0]["loss"]) == 0.1 + 0.2


def test_a_resumed_run_continues_the_log_from_its_step(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    log(path, done=0, last=7)
    # The last checkpoint was that of step 4.
    log(path, done=4, last=10)
    assert logged_steps(path) == list(range(1, 11))
    # A run that starts from the beginning replaces the log.
    log(path, done=0, last=2)
    assert logged_steps(path) == [1, 2]


def test_damaged_lines_as_by_a_crash_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    log(path, done=0, last=3)
    with path.open("a") as file:
        file.write("4,0.")
    assert logged_steps(path) == [1, 2, 3]
    log(path, done=3, last=4)
    assert logged_steps(path) == [1, 2, 3, 4]
    # Of the four lines after the header, only the last one is valid. The first has too few fields,
    # the second has the step "x", and the third has too many fields.
    path.write_text("step,loss,lr,grad_norm,seconds\n1,2\nx,1,1,1,1\n2,1,1,1,1,1\n3,1,1,1,1\n")
    assert logged_steps(path) == [3]


def test_every_nth_step_and_the_last_are_logged(tmp_path: Path) -> None:
    log(tmp_path / "a.csv", done=0, last=10, every=4)
    assert logged_steps(tmp_path / "a.csv") == [4, 8, 10]


def test_missing_files_and_files_of_other_columns_give_no_rows(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none.csv") == []
    (tmp_path / "a.csv").write_text("time,value\n1,2\n")
    assert read_log(tmp_path / "a.csv") == []


def test_the_bar_shows_step_loss_learning_rate_and_time() -> None:
    screen = io.StringIO()
    bar = ProgressBar(screen)
    bar.on_train_begin(trainer_at(4))
    bar.on_step_end(trainer_at(5), report(5, loss=2.0))
    bar.on_train_end(trainer_at(5))
    shown = screen.getvalue()
    assert "5/10" in shown
    assert "loss 2.0000, lr 1.00e-04, 250 ms" in shown


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
def test_events_before_training_begins_do_not_fail_in_a_progress_bar(event: str) -> None:
    bar = ProgressBar(io.StringIO())
    getattr(bar, event)(trainer_at(1), *([report(1)] if event == "on_step_end" else []))
