"""Training continues while a checkpoint is written.

A write that fails or is killed leaves a complete checkpoint, from which the run resumes.

The run of the fixture `config` has 12 steps, and saves a checkpoint every 5 steps and at its end.
The fixture `train` runs a configuration and returns the bytes of the adapter's parameters.
"""

import errno
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.cli import main
from trainable_candle.errors import FileError, NonFiniteError
from trainable_candle.run import ADAPTER, train_adapter
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer, saver, state
from trainable_candle.train.state import checkpoint_path, checkpoints

Train = Callable[..., dict[str, bytes]]
PARAMETERS = "parameters.safetensors"


class CallAfter(Callback):
    """Calls `action` after step `step`."""

    def __init__(self, step: int, action: Callable[[Trainer[Any]], object]) -> None:
        self._step = step
        self._action = action

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        if report.step == self._step:
            self._action(trainer)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that a test sets to let checkpoints be written; until then, their writer waits."""
    event = threading.Event()

    class WaitingDraft(state.Draft):
        def write(self, snapshot: state.Snapshot) -> None:
            assert event.wait(60), "training waited for the checkpoint"
            super().write(snapshot)

    monkeypatch.setattr(saver, "Draft", WaitingDraft)
    return event


def test_training_continues_while_a_snapshot_is_written(
    config: TrainConfig, train: Train, gate: threading.Event
) -> None:
    bits: dict[str, bytes] = {}

    def keep_parameters(trainer: Trainer[Any]) -> None:
        bits.update({n: v.detach().numpy().tobytes() for n, v in trainer.parameters.items()})

    def open_gate(trainer: Trainer[Any]) -> None:
        assert trainer.output is not None
        assert checkpoints(trainer.output) == []
        gate.set()

    # The checkpoint of step 5 is written after step 8, and has the parameters of step 5.
    train(config, CallAfter(5, keep_parameters), CallAfter(8, open_gate))
    stored = tc.load_file(checkpoint_path(Path(config.output), 5) / PARAMETERS)
    assert {name: tensor.numpy().tobytes() for name, tensor in stored.items()} == bits


def test_the_older_checkpoint_stays_until_the_newer_is_complete(
    config: TrainConfig, train: Train, gate: threading.Event
) -> None:
    steps: list[list[int]] = []

    def list_checkpoints(trainer: Trainer[Any]) -> None:
        assert trainer.output is not None
        steps.append([state.step_of(path) for path in checkpoints(trainer.output)])

    def save_at_once(trainer: Trainer[Any]) -> None:
        gate.set()
        trainer.save()  # writes a checkpoint and waits for it
        gate.clear()

    # After step 7, the checkpoint of step 5 waits to be written.
    train(
        config.with_(keep_checkpoints=1),
        CallAfter(2, save_at_once),
        CallAfter(7, list_checkpoints),
        CallAfter(8, lambda _: gate.set()),
    )
    assert steps == [[2]]
    assert [state.step_of(path) for path in checkpoints(Path(config.output))] == [12]


def test_a_checkpoint_that_is_being_written_is_completed_if_training_fails(
    config: TrainConfig, gate: threading.Event
) -> None:
    def fail(_: Trainer[Any]) -> None:
        # The writer goes on 0.2 s later, when the error has ended the training loop.
        threading.Timer(0.2, gate.set).start()
        raise NonFiniteError("the loss is nan")

    with pytest.raises(NonFiniteError, match="the loss is nan"):
        train_adapter(config, callbacks=[CallAfter(6, fail)], progress=False, report=lambda _: None)
    assert [state.step_of(path) for path in checkpoints(Path(config.output))] == [5]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Within this context, writing more than `size` bytes to a file fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("when", ["while the checkpoint is begun", "steps later"])
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    config: TrainConfig, train: Train, gate: threading.Event, when: str
) -> None:
    is_late = when == "steps later"
    begun: list[int] = []

    class SaveRecorder(Callback):
        """Records the step of each checkpoint that is begun."""

        def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
            begun.append(trainer.step)

    class ManyJobs(Callback):
        """Unless `is_late`, submits more jobs at step 6 than the queue of the writer holds.

        At a full queue, `write_later` waits for the writer. The writer fails to write the
        checkpoint of step 6, and `write_later` raises its error.
        """

        def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
            for _ in range(0 if is_late or trainer.step < 6 else 100):
                trainer.write_later(lambda: None)

    def fill_disk(trainer: Trainer[Any]) -> None:
        trainer.save()  # writes the checkpoint of step 5 and waits for it
        # From now on, no file can have more than 4096 bytes. `file_size_limit` restores the limit.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        if is_late:
            gate.clear()  # the writer of the next checkpoint, of step 6, waits until after step 8

    gate.set()
    release = CallAfter(8, lambda _: gate.set())
    callbacks = [CallAfter(5, fill_disk), release, ManyJobs(), SaveRecorder()]
    # `fill_disk` lowers this limit, which is above the size of every file.
    with file_size_limit(1 << 30), pytest.raises(FileError) as caught:
        train(config.with_(save_every=3), *callbacks)
    assert caught.value.errno == errno.EFBIG
    assert "checkpoint-000006.partial" in str(caught.value)
    # The training loop raises the error at its next call of the saver. That is in `ManyJobs` or, if
    # the write fails late, after a later step or before the next checkpoint. An error in `ManyJobs`
    # keeps the next callback, `SaveRecorder`, from running.
    assert begun == ([3, 5, 6] if is_late else [3, 5])
    output = Path(config.output)
    assert sorted(path.name for path in output.glob("*checkpoint*")) == [
        "checkpoint-000003",
        "checkpoint-000005",
    ]
    assert not (output / ADAPTER).exists()
    resumed = config.with_(save_every=3, resume="latest")
    uninterrupted = config.with_(save_every=3, output=str(output.with_name("uninterrupted")))
    assert train(resumed) == train(uninterrupted)


def test_a_callback_that_cannot_write_its_file_ends_the_run_without_a_checkpoint(
    config: TrainConfig, train: Train
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class FailingJob(Callback):
        def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
            trainer.write_later(refuse)

    with pytest.raises(OSError, match="No space left"):
        train(config, FailingJob())
    assert list(Path(config.output).glob("*checkpoint*")) == []


@pytest.mark.parametrize("reason", ["full", "read-only"])
def test_the_command_prints_why_it_cannot_write_and_ends(
    config: TrainConfig, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Nobody can create a folder in /sys.
    output = config.output if reason == "full" else "/sys/trainable-candle"
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.with_(output=output).to_yaml())
    with file_size_limit(4096 if reason == "full" else 1 << 30):
        status = main(["train", "--config", str(settings)])
    assert status == 2
    error = capsys.readouterr().err
    assert (".safetensors: File too large\n" if reason == "full" else output) in error
    assert "Traceback" not in error


# Each child process saves a checkpoint. The first child is killed at its first file operation, and
# each later child one operation later than the child before it. The last child is not killed.
STEPWISE = """
import os, signal, sys
from pathlib import Path
import numpy as np, trainable_candle as tc
from trainable_candle.train import state

output = Path(sys.argv[1])
folder = state.checkpoint_path(output, 3)

def save(value):
    parameters = {"a": tc.Var(np.full((2, 3), value, np.float32))}
    optimizer = tc.optim.AdamW(list(parameters.values()), lr=0.1)
    facts = state.RunState(step=3, batches=3, scaler=None, settings={"value": value})
    state.save(folder, parameters, optimizer, facts)

def save_until_killed(allowed, value):
    def hook(event, _):
        nonlocal allowed
        if event.startswith(("open", "os.", "shutil.")):
            allowed -= 1
            if allowed == -1:  # not below: `os.kill` is an event, too
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(value)
    os._exit(0)

save(1.0)
value = 1.0
for number in range(1000):
    child = os.fork()
    if child == 0:
        save_until_killed(number, 2.0 + number)
    status = os.waitpid(child, 0)[1]
    # Restore and find the checkpoint as a new run does before it resumes.
    if state.needs_restoring(output):
        print("restored")
        state.restore(output)
    facts = state.read_state(state.find(output, "latest"))
    state.remove_leftovers(output)
    assert [path.name for path in output.iterdir()] == [folder.name], number
    assert facts.settings["value"] in (value, 2.0 + number), (number, value, facts)
    value = facts.settings["value"]
    stored = tc.load_file(folder / "parameters.safetensors")["a"].numpy()
    assert (stored == value).all(), (number, stored)
    if status == 0:
        break
assert value == 2.0 + number
print("steps", number)
"""


def test_a_save_that_is_killed_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STEPWISE, str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.split("\n")
    # A save renames the old checkpoint, then gives its name to the new one.
    assert "restored" in lines, "no process was killed between the two renames"
    # The last line is "steps N": N children were killed. A save takes more than 12 file operations.
    assert int(lines[-2].split()[1]) > 12


# Trains by the configuration in the first argument. The second argument is N: the run is killed at
# the Nth audit event in the thread that writes checkpoints, without counting the events
# `object.__getattr__`. If N is 0, the run is not killed.
KILLED = """
import os, signal, sys, threading
left = int(sys.argv[2])

def hook(event, _):
    global left
    if threading.current_thread().name == "checkpoints" and event != "object.__getattr__":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
from trainable_candle.cli import main
sys.exit(main(["train", "--config", sys.argv[1], *sys.argv[3:]]))
"""


def test_a_run_that_is_killed_while_saving_resumes_bit_for_bit(
    config: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = config.with_(save_every=1, keep_checkpoints=1, ema_decay=0.9)
    train(config)
    interrupted = config.with_(output=str(tmp_path / "interrupted"))
    settings = tmp_path / "settings.yaml"
    settings.write_text(interrupted.to_yaml())
    statuses = []
    # The first four runs are killed at different points of their saves; the last is not killed.
    for events in (11, 29, 47, 90, 0):
        resume = ["--resume", "latest"] if checkpoints(Path(interrupted.output)) else []
        command = [sys.executable, "-c", KILLED, str(settings), str(events), *resume]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        statuses.append(run.returncode)
        assert run.returncode in {0, -signal.SIGKILL}, run.stderr
    assert statuses == [-signal.SIGKILL] * 4 + [0]
    first, second = (tc.load_file(Path(run.output) / ADAPTER) for run in (config, interrupted))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor.numpy(), second[name].numpy())
