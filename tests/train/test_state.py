"""Checkpoints are complete or absent, and are checked when they are read."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.run import train_adapter
from trainable_candle.train import Callback, TrainConfig, Trainer, state


def variables() -> dict[str, tc.Var]:
    return {
        "a": tc.Var(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "b": tc.Var(np.ones(2, np.float32)),
    }


def optimizer_after_a_step(parameters: dict[str, tc.Var]) -> tc.optim.Optimizer:
    """Return an optimizer that has taken one step, which changed the parameters."""
    optimizer = tc.optim.AdamW(list(parameters.values()), lr=0.1)
    sum((var * var).sum() for var in parameters.values()).backward()
    optimizer.step()
    return optimizer


def run_state(step: int) -> state.RunState:
    """Return a state after `step` steps; its other values are arbitrary."""
    return state.RunState(step=step, batches=2 * step, scaler={"scale": 2.0}, settings={"rank": 4})


def save(output: Path, step: int) -> Path:
    """Save a checkpoint of `variables` after one update, and return its folder."""
    parameters = variables()
    folder = state.checkpoint_path(output, step)
    state.save(folder, parameters, optimizer_after_a_step(parameters), run_state(step))
    return folder


def names(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir())


def test_saved_values_are_loaded(tmp_path: Path) -> None:
    saved = variables()
    optimizer = optimizer_after_a_step(saved)
    folder = state.checkpoint_path(tmp_path, 7)
    state.save(folder, saved, optimizer, run_state(7))
    loaded = variables()
    loaded_optimizer = tc.optim.AdamW(list(loaded.values()), lr=0.1)
    assert state.load(folder, loaded, loaded_optimizer) == run_state(7)
    for name, var in loaded.items():
        np.testing.assert_array_equal(var.detach().numpy(), saved[name].detach().numpy())
    expected, found = optimizer.state_dict(), loaded_optimizer.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[key].numpy())


def test_a_later_step_does_not_change_a_saved_optimizer_state(tmp_path: Path) -> None:
    parameters = variables()
    optimizer = optimizer_after_a_step(parameters)
    before = {key: tensor.numpy() for key, tensor in optimizer.state_dict().items()}
    folder = state.checkpoint_path(tmp_path, 1)
    state.save(folder, parameters, optimizer, run_state(1))
    optimizer.step()
    stored = tc.load_file(folder / "optimizer.safetensors")
    for key, value in before.items():
        np.testing.assert_array_equal(stored[key].numpy(), value)


def test_prune_keeps_only_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in (5, 40, 300, 1000000, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint-000400").mkdir()  # incomplete: neither counted nor removed
    (tmp_path / "checkpoint-final").mkdir()  # no checkpoint of a run
    state.prune(tmp_path, 2)
    assert [state.step_of(path) for path in state.checkpoints(tmp_path)] == [300, 1000000]
    assert {"checkpoint-000400", "checkpoint-final"} <= set(names(tmp_path))


def test_saving_again_replaces_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (state.checkpoint_path(tmp_path, 3) / "stray").write_text("from the first save")
    save(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-000003"]
    assert names(state.checkpoint_path(tmp_path, 3)) == [
        "optimizer.safetensors",
        "parameters.safetensors",
        "state.json",
    ]


@pytest.mark.parametrize("function", ["save_file", "write_atomically"])
def test_a_write_that_fails_leaves_older_checkpoints(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tc if function == "save_file" else state, function, fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert state.checkpoints(tmp_path) == [state.checkpoint_path(tmp_path, 1)]
    save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


@pytest.mark.parametrize("function", ["write_atomically", "sync_folder"])
def test_a_process_killed_while_saving_leaves_complete_checkpoints(
    tmp_path: Path, function: str
) -> None:
    save(tmp_path, 1)
    # The process kills itself when `state.save` calls `function`.
    code = f"""
import os, signal
import numpy as np, trainable_candle as tc
from trainable_candle.train import state
state.{function} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
parameters = {{"a": tc.Var(np.zeros((2, 3), np.float32)), "b": tc.Var(np.zeros(2, np.float32))}}
optimizer = tc.optim.AdamW(list(parameters.values()), lr=0.1)
from pathlib import Path
folder = state.checkpoint_path(Path({str(tmp_path)!r}), 2)
run_state = state.RunState(step=2, batches=2, scaler=None, settings={{}})
state.save(folder, parameters, optimizer, run_state)"""
    run = subprocess.run([sys.executable, "-c", code], check=False)
    assert run.returncode == -signal.SIGKILL
    # Only the call of `sync_folder` follows the rename that makes the checkpoint complete.
    expected = {"write_atomically": 1, "sync_folder": 2}[function]
    newest = state.find(tmp_path, "latest")
    assert newest == state.checkpoint_path(tmp_path, expected)
    parameters = variables()
    loaded = state.load(newest, parameters, tc.optim.AdamW(list(parameters.values()), lr=0.1))
    assert loaded.step == expected


def test_starting_in_a_folder_with_later_checkpoints_is_an_error(tmp_path: Path) -> None:
    state.refuse_later(tmp_path / "missing", 0)  # no error: there is no folder
    save(tmp_path, 10)
    state.refuse_later(tmp_path, 10)  # no error: no checkpoint is later than step 10
    with pytest.raises(ConfigError, match=r"holds checkpoint-000010 of an earlier run; .* latest"):
        state.refuse_later(tmp_path, 9)


def test_find_returns_a_checkpoint_or_reports_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no checkpoint in .*; leave --resume out"):
        state.find(tmp_path, "latest")
    assert state.find(tmp_path, "auto") is None
    with pytest.raises(ConfigError, match=r"is not a checkpoint folder \(it has no state\.json\)"):
        state.find(tmp_path, str(tmp_path))
    folder = save(tmp_path, 4)
    assert state.find(tmp_path, str(folder)) == state.find(tmp_path, "latest") == folder
    assert state.find(tmp_path, "auto") == folder


def load(folder: Path) -> None:
    """Load a checkpoint into new parameters and a new optimizer."""
    parameters = variables()
    state.load(folder, parameters, tc.optim.AdamW(list(parameters.values()), lr=0.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: state.json: "),
        ("[]", "is damaged: state.json: "),
        ("{}", "is damaged: state.json: "),
        ('{"format": 2}', "is damaged: state.json: "),
        ('{"format": 2, "step": 1}', "is damaged: state.json: "),
        ('{"format": 1}', "has format 1, expected 2: it was written by another version"),
    ],
    ids=["cut", "list", "empty", "without_step", "without_settings", "other_version"],
)
def test_a_state_file_that_is_damaged_or_of_another_version_is_rejected(
    tmp_path: Path, text: str, message: str
) -> None:
    folder = save(tmp_path, 1)
    (folder / "state.json").write_text(text)
    with pytest.raises(WeightsFormatError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["parameters.safetensors", "optimizer.safetensors", "state.json"])
def test_a_file_that_is_cut_at_any_byte_or_missing_is_rejected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    content = (folder / name).read_bytes()
    for length in range(len(content)):
        (folder / name).write_bytes(content[:length])
        with pytest.raises(WeightsFormatError) as caught:
            load(folder)
        message = str(caught.value)
        assert message.startswith(f"resume: {folder} is damaged: {name}: "), length
        assert message.endswith(
            "remove that folder, and --resume latest continues from checkpoint-000001"
        )
    (folder / name).unlink()
    with pytest.raises(WeightsFormatError, match=f"is damaged: {name}: "):
        load(folder)


def test_the_error_for_a_damaged_checkpoint_says_if_there_is_no_earlier_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    save(tmp_path, 3)
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(WeightsFormatError, match="no earlier checkpoint: remove that folder"):
        load(folder)


def test_a_deeply_nested_state_file_is_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    (folder / "state.json").write_text("[" * 100_000)
    with pytest.raises(WeightsFormatError, match=r"is damaged: state\.json: "):
        load(folder)


def test_a_checkpoint_of_another_adapter_is_rejected_and_changes_no_parameter(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path, 1)
    others = [
        ({"a": (2, 3)}, r"holds other parameters .* \(1 differ, the first is b\)"),
        ({"a": (2, 3), "b": (2,), "c": (1,)}, "the first is c"),
        ({"a": (2, 4), "b": (2,)}, r"a in .* has shape \(2, 3\).*, expected \(2, 4\)"),
    ]
    for shapes, message in others:
        parameters = {name: tc.Var(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        optimizer = tc.optim.AdamW(list(parameters.values()), lr=0.1)
        with pytest.raises(WeightsFormatError, match=message) as caught:
            state.load(folder, parameters, optimizer)
        assert "resume with the settings that the run was started with" in str(caught.value)
        assert all(not var.detach().numpy().any() for var in parameters.values())


def test_a_checkpoint_of_another_optimizer_is_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    parameters = variables()
    optimizer = tc.optim.Lion(list(parameters.values()), lr=0.1)
    with pytest.raises(WeightsFormatError, match=r"has the state of another optimizer"):
        state.load(folder, parameters, optimizer)


def test_the_state_is_json_with_step_and_settings(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    stored = json.loads((folder / "state.json").read_text())
    assert (stored["step"], stored["settings"]) == (3, {"rank": 4})


def test_half_written_and_half_removed_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    # Files and folders are `.partial` while they are written, and folders are renamed to `.removed`
    # before their files are removed.
    (tmp_path / "checkpoint-000002.partial").mkdir()
    (tmp_path / "checkpoint-000002.partial" / "state.json").write_text("{")
    (tmp_path / "checkpoint-000001.removed").mkdir()
    (tmp_path / ".adapter.safetensors.1.partial").write_bytes(b"half")
    (tmp_path / "adapter.safetensors").write_bytes(b"whole")
    state.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.safetensors"]


def test_a_checkpoint_that_cannot_be_written_leaves_no_files(config: TrainConfig) -> None:
    class FullDisk(Callback):
        def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
            # The trainer calls `on_save` when it begins to write the checkpoint.
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with pytest.raises(OSError, match="No space left"):
        train_adapter(config, callbacks=[FullDisk()], progress=False, report=lambda _: None)
    assert not list(Path(config.output).glob("checkpoint*"))
