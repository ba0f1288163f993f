"""Starts a process for each chosen GPU of this machine, and supervises the processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from trainable_candle.distributed.world import (
    JOB,
    RENDEZVOUS,
    from_environment,
    machine_from_environment,
)
from trainable_candle.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

LAUNCHER: Final = "TRAINABLE_CANDLE_LAUNCHER"
"""The environment variable with the file descriptor of a pipe from the launcher to this process.
The launcher writes nothing to the pipe; its end of the pipe closes when it ends."""
LOGS: Final = "logs"
"""The folder, inside the folder of the run, with the logs of all processes but the first."""
GRACE: Final = 15.0
"""Seconds that the other processes get to end after one has failed."""
_TAIL: Final = 12
"""The number of lines that are shown from the end of a failed process's log."""
_SOCKET_PATH: Final = 90
"""The number of characters that every system allows in the path of a socket."""
_SOCKET_NAME: Final = 30
"""The number of characters reserved for `/tc-XXXXXXXX/rendezvous`, the end of the path."""

_COUNT: Final = (
    "from trainable_candle import cuda\n"
    "print(cuda.device_count() if cuda.is_available() else cuda.unavailable_reason())"
)
"""A program that prints the number of GPUs, or why no GPU can be used."""


def chosen_gpus(text: str) -> list[int]:
    """Return the indices of the GPUs that `--gpus` selects.

    Args:
        text: the value of `--gpus`: `all`, a number of GPUs, or indices with commas between them.

    Raises:
        DeviceError: CUDA shows fewer GPUs than `text` needs, or none can be used.
    """
    # Count in another process: a launcher that uses CUDA would occupy memory on the first GPU.
    counted = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False
    )
    # The last line of stdout or, if the program has failed, its stderr.
    [answer] = counted.stdout.strip().splitlines()[-1:] or [counted.stderr.strip()]
    if not answer.isdecimal():
        raise DeviceError(f"gpus: {text} asked for, and no GPU can be used: {answer}")
    count = int(answer)
    if text == "all":
        return list(range(count))
    # With commas, the numbers are indices; a number alone says how many GPUs.
    numbers = [int(number) for number in text.split(",")]
    wanted = numbers if "," in text else list(range(numbers[0]))
    if max(wanted) >= count:
        plural = "GPU" if count == 1 else "GPUs"
        raise DeviceError(
            f"gpus: {text} asked for, and CUDA shows {count} {plural}; give --gpus {count}"
        )
    return wanted


def launch(arguments: Sequence[str], gpus: Sequence[int], *, on_gpu: bool, output: Path) -> int:
    """Run `trainable-candle train ARGUMENTS` once for each GPU, as one run.

    On each machine, the first process writes to the terminal, the others to files in `output/logs`.
    After Ctrl-C or SIGTERM the run saves and ends in all processes; a second Ctrl-C ends it at
    once. If the environment describes several machines, the processes of all machines are one run,
    and each machine must use the same number of GPUs.

    Args:
        arguments: the arguments of the command.
        gpus: the indices of the GPUs, as CUDA shows them to this process.
        on_gpu: whether the processes compute on the GPUs; if not, only the number of `gpus` counts.
        output: the folder of the run.

    Returns:
        The exit status of the process that failed first, or 128 + n if signal n ended it; 0 if
        none failed.

    Raises:
        ConfigError: an environment variable about the processes or the machines is missing or
            wrong, or `CUDA_VISIBLE_DEVICES` shows too few GPUs.
        OSError: a process cannot be started, or its log cannot be written.
    """
    # The index of this machine, and the number of machines.
    machine, machines = machine_from_environment()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tc-", dir=_parent())))
        reading, writing = os.pipe()
        stack.callback(os.close, writing)
        shared = {LAUNCHER: str(reading)}
        # The name of the run, and the socket at which its processes meet. Several machines cannot
        # share a socket in a folder: their processes meet at MASTER_ADDR.
        if machines == 1:
            shared |= {JOB: secrets.token_hex(16), RENDEZVOUS: str(folder / "rendezvous")}
        if on_gpu:
            shared["CUDA_VISIBLE_DEVICES"] = _visible(gpus)
        logs = output / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        processes: list[subprocess.Popen[bytes]] = []
        first_rank = machine * len(gpus)
        environments = [
            {**os.environ, **shared, **_rank_variables(first_rank, number, len(gpus), machines)}
            for number in range(len(gpus))
        ]
        from_environment(environments[0])  # Raises for wrong variables before a process starts.
        for number, environment in enumerate(environments):
            log: IO[bytes] | None = None
            if number > 0:
                log = stack.enter_context(_log(logs, first_rank + number).open("wb"))
            processes.append(
                subprocess.Popen(  # noqa: S603 - this interpreter
                    [sys.executable, "-m", "trainable_candle", "train", *arguments],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT if log else None,
                    pass_fds=(reading,),
                )
            )
        os.close(reading)
        return _Watch(processes, logs, first_rank).run()


def rank_environment(folder: Path, rank: int, size: int) -> dict[str, str]:
    """Return the environment of process `rank` of a run whose `size` processes are on this machine.

    The processes meet at a socket in `folder`.
    """
    # With one machine, the number of a process on the machine is its rank.
    variables = _rank_variables(first_rank=0, number=rank, count=size, machines=1)
    return {**os.environ, RENDEZVOUS: str(folder / "rendezvous"), **variables}


def _rank_variables(first_rank: int, number: int, count: int, machines: int) -> dict[str, str]:
    """Return the environment variables that give process `number` of a machine its ranks.

    Each machine has `count` processes. The first process of this machine has rank `first_rank`.
    """
    values = {
        "RANK": first_rank + number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": machines * count,
        "LOCAL_WORLD_SIZE": count,
    }
    return {name: str(value) for name, value in values.items()}


class _Watch:
    """Waits for processes, and kills the others `GRACE` seconds after one has failed."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[bytes]], logs: Path, first_rank: int
    ) -> None:
        self._processes = processes
        self._logs = logs
        self._first_rank = first_rank
        """The rank of this machine's first process."""
        self._interrupts = 0
        """How often SIGINT has arrived."""

    def run(self) -> int:
        """Wait for the processes; returns the exit status of the run."""
        handlers = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return self._wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            # The terminal sends SIGINT to the processes, too, so forward nothing. The second SIGINT
            # kills them.
            self._interrupts += 1
            if self._interrupts > 1:
                self._signal(signal.SIGKILL)
            return
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _wait(self) -> int:
        # The number of the process that failed first.
        failed: int | None = None
        deadline = float("inf")
        while True:
            statuses = [process.poll() for process in self._processes]
            if failed is None:
                failed = next((n for n, status in enumerate(statuses) if status), None)
                if failed is not None:
                    deadline = time.monotonic() + GRACE
            if None not in statuses:
                break
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        if failed is None:
            return 0
        # Process 0 has written its error to the terminal. After Ctrl-C, a failure is no surprise.
        if failed > 0 and not self._interrupts:
            self._show(failed)
        status = self._processes[failed].returncode
        return status if status > 0 else 128 - status  # `Popen` gives -n for signal n.

    def _show(self, number: int) -> None:
        """Print how a process ended, and the end of its log."""
        status = self._processes[number].returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        rank = self._first_rank + number
        path = _log(self._logs, rank)
        print(f"error: rank {rank} ended with {how}; the end of {path}:", file=sys.stderr)
        for line in path.read_text(errors="replace").splitlines()[-_TAIL:]:
            print(f"  {line}", file=sys.stderr)


def is_launched() -> bool:
    """Return whether `launch` has started this process."""
    return LAUNCHER in os.environ


def follow_launcher() -> None:
    """Begin to watch the launcher; when it ends, this process gets SIGTERM.

    Without a launcher, do nothing.
    """
    text = os.environ.get(LAUNCHER)
    if text is None:
        return

    def watch() -> None:
        os.read(int(text), 1)  # Returns when the launcher's end of the pipe closes.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def _visible(gpus: Sequence[int]) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` that shows only `gpus`.

    The indices `gpus` count the devices that this process sees.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    if names and max(gpus) >= len(names):
        raise ConfigError(
            f"gpus: GPU {max(gpus)} asked for, and CUDA_VISIBLE_DEVICES={given} shows only GPUs 0 "
            f"to {len(names) - 1}"
        )
    return ",".join(names[gpu] if names else str(gpu) for gpu in gpus)


def _parent() -> str | None:
    """Return where to make the folder of the socket: None for the usual place, or `/tmp`.

    `/tmp` is for systems whose usual place has a path too long for a socket inside it.
    """
    usual = tempfile.gettempdir()
    return None if len(usual) < _SOCKET_PATH - _SOCKET_NAME else "/tmp"  # noqa: S108
