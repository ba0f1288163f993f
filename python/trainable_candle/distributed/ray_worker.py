"""The actor that Ray starts for each process: it reports which machine it is on, and trains."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import (
    ArgumentError,
    ConfigError,
    DatasetError,
    DistributedError,
    MissingFileError,
    NonFiniteError,
    WeightsFormatError,
)
from trainable_candle.run import train_adapter
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.state import checkpoints

if TYPE_CHECKING:
    from trainable_candle.distributed.world import World
    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.trainer import StepReport, Trainer

FINAL: Final = (
    ArgumentError,
    ConfigError,
    DatasetError,
    MissingFileError,
    NonFiniteError,
    WeightsFormatError,
)
"""Errors that another attempt would meet, too."""
_LINE_SECONDS: Final = 10.0
"""The least number of seconds between two lines of progress; the last step has a line anyway."""
_LOOK_SECONDS: Final = 3.0
"""Seconds that a file written by another machine may take to become visible."""


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    node: str
    """Ray's identifier of the machine."""
    address: str
    """The machine's address in the cluster."""
    pid: int


@dataclass(frozen=True)
class Outcome:
    """How training ended in a process."""

    step: int = 0
    """The number of optimizer steps; 0 if the process failed."""
    completed: bool = False
    """Whether the last step was reached."""
    error: str = ""
    """Why the process failed; empty if it did not fail."""
    is_final: bool = False
    """Whether another attempt would end in the same way."""
    follows: bool = False
    """Whether the process probably failed only because another one had failed."""


class Worker:
    """A process of a run, as an actor. It can use only the GPU that Ray has reserved for it."""

    def __init__(self) -> None:
        self._stop_requested = threading.Event()
        """Set when the run is to stop."""

    def place(self) -> Place:
        """Return where this process runs."""
        import ray  # noqa: PLC0415 - only actors need it

        util: Any = ray.util  # has no types
        node = ray.get_runtime_context().get_node_id()
        return Place(node, util.get_node_ip_address(), os.getpid())

    def free_port(self, address: str) -> int:
        """Return a port on which no process listens at `address`, an address of this machine."""
        with socket.socket() as free:
            free.bind((address, 0))
            port: int = free.getsockname()[1]
            return port

    # The next three methods find out whether the machines share the output folder: one machine
    # writes a file there, and the others look for it.

    def write_mark(self, output: str, name: str) -> None:
        """Write an empty file with the given name into the output folder."""
        folder = Path(output).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def sees(self, output: str, name: str) -> bool:
        """Return whether this machine sees the file that `write_mark` wrote on another.

        Wait a few seconds for the file.
        """
        path = Path(output).expanduser() / name
        deadline = time.monotonic() + _LOOK_SECONDS
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return path.exists()

    def remove(self, output: str, name: str) -> None:
        """Remove the file that `write_mark` has written on this machine."""
        (Path(output).expanduser() / name).unlink(missing_ok=True)

    def has_checkpoint(self, output: str) -> bool:
        """Return whether the output folder has a checkpoint to continue from."""
        return bool(checkpoints(Path(output).expanduser()))

    def stop(self) -> None:
        """Ask the run to stop: all processes save and end after the current step."""
        self._stop_requested.set()

    def run(self, config: TrainConfig, world: World | None) -> Outcome:
        """Train, and return how that ended.

        An exception becomes a part of the result, because Ray cannot transfer every exception.
        """
        callbacks = [_StopIfSet(self._stop_requested), _ProgressLines()]
        try:
            # Ray forwards printed lines to the process that started the run.
            run = train_adapter(
                config, callbacks=callbacks, progress=False, report=_print_line, world=world
            )
        except Exception as error:  # noqa: BLE001 - the caller gets it
            text = str(error) or type(error).__name__
            return Outcome(
                error=text,
                is_final=isinstance(error, FINAL),
                follows=isinstance(error, DistributedError),
            )
        return Outcome(run.step, run.completed)


class _StopIfSet(Callback):
    """Stops the run when an event is set.

    The processes agree on stopping, so all of them end after the same step.
    """

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Stop the run if the event is set."""
        if self._event.is_set():
            trainer.stop()


class _ProgressLines(Callback):
    """Prints progress in lines, for a log."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Print a line if the last one is old enough or the run is complete."""
        now = time.monotonic()
        if now - self._printed_at < _LINE_SECONDS and report.step < trainer.steps:
            return
        self._printed_at = now
        # The unit of the rate depends on the task: images or tokens. `amount`, their number in the
        # step, is 0 if the trainer does not count them.
        speed = f", {report.rate:.3g} a second" if report.amount else ""
        _print_line(f"step {report.step} of {trainer.steps}: loss {report.loss:.4f}{speed}")


def _print_line(line: str) -> None:
    print(line, flush=True)
