"""The JSON log, the TensorBoard log, and damaged lines of the CSV log.

test_callbacks.py has the other tests of the CSV log.
"""

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainable_candle.train import JsonLog, StepReport, TensorBoardLog
from trainable_candle.train.logs import read_json_log, read_log


def trainer_at(step: int) -> Any:
    """Return a stand-in for a trainer that has taken `step` of 10 steps."""
    return SimpleNamespace(step=step, steps=10)


def report(step: int, grad_norm: float = 1.5) -> StepReport:
    """Return the report of a step; its loss needs all 17 digits, so that rounding would show."""
    return StepReport(step, loss=0.1 + 0.2, lr=1e-4, grad_norm=grad_norm, seconds=0.25)


def log_steps(callback: JsonLog | TensorBoardLog, start: int, end: int) -> None:
    """Log steps `start` + 1 to `end`, and a validation loss after each even step."""
    callback.on_train_begin(trainer_at(start))
    for step in range(start + 1, end + 1):
        callback.on_step_end(trainer_at(step), report(step))
        if step % 2 == 0:
            callback.on_metrics(trainer_at(step), {"validation_loss": float(step)})
    callback.on_train_end(trainer_at(end))


def test_every_line_of_the_json_log_is_an_object_with_a_step(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log_steps(JsonLog(path), 0, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.1 + 0.2, "lr": 1e-4, "grad_norm": 1.5, "seconds": 0.25},
        {"step": 2, "loss": 0.1 + 0.2, "lr": 1e-4, "grad_norm": 1.5, "seconds": 0.25},
        {"step": 2, "validation_loss": 2.0},
    ]


def test_non_finite_numbers_are_null_in_the_json_log(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    callback = JsonLog(path)
    callback.on_train_begin(trainer_at(0))
    callback.on_step_end(trainer_at(1), report(1, grad_norm=float("inf")))
    assert '"grad_norm": null' in path.read_text()


def test_a_resumed_run_continues_the_json_log_from_its_step(tmp_path: Path) -> None:
    path, uninterrupted = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    log_steps(JsonLog(uninterrupted), 0, 8)
    log_steps(JsonLog(path), 0, 7)
    # The first run stops while it writes the line of step 8, and resumes after step 4.
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    log_steps(JsonLog(path), 4, 8)
    assert path.read_text() == uninterrupted.read_text()


def test_a_new_run_empties_the_json_log(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    callback = JsonLog(path)
    callback.on_train_begin(trainer_at(0))
    callback.on_metrics(trainer_at(0), {"validation_loss": 1.0})
    callback.on_train_begin(trainer_at(0))
    assert path.read_text() == ""


def test_lines_without_a_step_are_left_out_and_a_missing_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('[1]\n{"a": 1}\n{"step": "x"}\nnothing\n{"step": 3}\n')
    assert read_json_log(path) == [{"step": 3}]
    assert read_json_log(tmp_path / "missing.jsonl") == []


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Return the step, tag and value of each point in the event files of a folder, in order."""
    from tensorboardX.proto.event_pb2 import Event

    # An event has 12 bytes before it (its length and a checksum) and 4 after it (a checksum).
    points = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = Event.FromString(data[12 : 12 + length])
            points += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[12 + length + 4 :]
    return points


def test_tensorboard_shows_only_the_losses_of_the_last_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log_steps(TensorBoardLog(tmp_path / "events"), 0, 2)
    found = scalars(tmp_path / "events")
    assert (2, "validation/loss", 2.0) in found
    assert [(step, tag) for step, tag, _ in found if tag == "train/loss"] == [
        (1, "train/loss"),
        (2, "train/loss"),
    ]
    # A new run removes the events of an earlier run.
    log_steps(TensorBoardLog(tmp_path / "events"), 0, 1)
    assert {step for step, _, _ in scalars(tmp_path / "events")} == {1}


def test_without_tensorboardx_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "trainable-candle\[tensorboard\]"'):
        TensorBoardLog(tmp_path)


def test_damaged_lines_of_the_csv_log_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    good = "3,0.5,0.1,1.0,0.01"
    # "\u00b2" is a digit, but `int` rejects it. The last damaged line is longer than a field of a
    # CSV file may be.
    damaged = ["\u00b2,0.5,0.1,1.0,0.01", "4,x,0.1,1.0,0.01", "5,0.5", "9" * 200_000]
    path.write_text("\n".join(["step,loss,lr,grad_norm,seconds", *damaged, good, ""]))
    assert [row["step"] for row in read_log(path)] == ["3"]
