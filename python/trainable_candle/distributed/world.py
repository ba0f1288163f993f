"""The rank of this process and the number of processes, from variables that launchers set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Address: TypeAlias = "str | tuple[str, int]"
"""Where rank 0 listens: the path of a socket on this machine, or a host and a port."""

# The next constants are names of environment variables; their docs say what the variables contain.
RENDEZVOUS: Final = "TRAINABLE_CANDLE_RENDEZVOUS"
"""The address that our launcher (`launch.py`) sets: `/path` or `host:port`."""
PORT: Final = "TRAINABLE_CANDLE_PORT"
"""The port at MASTER_ADDR. Without it, the port is MASTER_PORT + 1, which may be taken; torchrun
itself listens at MASTER_PORT."""
MACHINES: Final = "NNODES"
"""The number of machines on which our launcher is started for the same run."""
MACHINE: Final = "NODE_RANK"
"""The index of this machine among the machines of the run, from 0."""
JOB: Final = "TRAINABLE_CANDLE_JOB"
"""The name of the job. Processes connect only to processes of a job with the same name."""

JOIN: Final = "TRAINABLE_CANDLE_JOIN_SECONDS"
"""The number of seconds that processes wait for one another at the start."""
JOIN_SECONDS: Final = 25.0
"""The default of `JOIN`; it can be short, because launchers start all processes at once."""

_JOBS: Final = (JOB, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid")
"""Environment variables that may contain the name of the job; the first that is set counts."""


@dataclass(frozen=True)
class _Names:
    """The names of the variables in which a launcher gives the ranks and numbers of processes."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS: Final = (
    # torchrun, accelerate, and our own launcher.
    _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# The names of SLURM, which sets these variables for the batch script, too, although the script is
# no process of the job. `from_environment` reads them only if `SLURM_STEP_ID` is set: srun sets it.
_SLURM: Final = _Names("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True)
class World:
    """The rank of this process among the processes that train together, and where they meet."""

    rank: int
    """The number of this process, from 0; rank 0 writes files and draws previews."""
    size: int
    """The number of processes."""
    local_rank: int
    """The number of this process among the processes of this machine, from 0."""
    local_size: int
    """The number of processes of this machine."""
    address: Address
    """Where rank 0 listens."""
    job: str
    """The name of the job; empty if the launcher gives none."""
    join_seconds: float = JOIN_SECONDS
    """Seconds to wait for the other processes at the start."""

    def device(self, visible: int) -> str:
        """Return the GPU of this process.

        Args:
            visible: the number of GPUs that CUDA shows to this process.

        Raises:
            ConfigError: `visible` is 0, or it is 2 or more and `local_rank` is not below it.
        """
        if visible == 1:  # The launcher shows each process only its own GPU.
            return "cuda:0"
        if self.local_rank < visible:
            return f"cuda:{self.local_rank}"
        cure = f"start at most {visible} processes there" if visible else "compute on the CPU"
        raise ConfigError(
            f"distributed: rank {self.rank} is process {self.local_rank} of its machine, which "
            f"shows {visible} GPUs; {cure}"
        )


def machine_from_environment(variables: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return the index of this machine and the number of machines.

    If neither `NODE_RANK` nor `NNODES` is set, return 0 and 1.

    Raises:
        ConfigError: only one of the two is set, one is not a number, or the index is too large.
    """
    env = os.environ if variables is None else variables
    texts = {name: env.get(name) for name in (MACHINE, MACHINES)}
    if not any(texts.values()):
        return 0, 1
    for name, text in texts.items():
        if text is None or not text.isdecimal():
            raise ConfigError(
                f"gpus: {name} is {'not set' if text is None else repr(text)}, expected a number: "
                f"{MACHINES} is the number of machines, {MACHINE} the index of this machine, from "
                "0; unset both for one machine"
            )
    machine, machines = int(env[MACHINE]), int(env[MACHINES])
    if machine >= machines:
        raise ConfigError(f"gpus: {MACHINE} is {machine}, expected below {MACHINES}, {machines}")
    return machine, machines


def from_environment(variables: Mapping[str, str] | None = None) -> World | None:
    """Return the ranks that a launcher has set; None without a launcher or for a single process.

    Raises:
        ConfigError: a variable is missing, or has a value that is not allowed.
    """
    env = os.environ if variables is None else variables
    names = next((names for names in _LAUNCHERS if names.rank in env), None)
    if names is None and "SLURM_STEP_ID" in env and _SLURM.rank in env:
        names = _SLURM
    if names is None:
        return None
    rank, size = _number(env, names.rank, names), _number(env, names.size, names)
    if size == 1:
        return None
    if not 0 <= rank < size:
        raise ConfigError(
            f"distributed: {names.rank} is {rank}, expected below {names.size}, {size}"
        )
    # Without a number of processes per machine, take all processes to be on this machine.
    local_size = int(env[names.local_size]) if env.get(names.local_size, "").isdigit() else size
    has_local_rank = names.local_rank in env
    local_rank = _number(env, names.local_rank, names) if has_local_rank else rank % local_size
    job = next((env[name] for name in _JOBS if env.get(name)), "")
    return World(rank, size, local_rank, local_size, _address(env), job, _join_seconds(env))


def _join_seconds(env: Mapping[str, str]) -> float:
    text = env.get(JOIN)
    if not text:
        return JOIN_SECONDS
    if text.isdecimal() and int(text) > 0:
        return float(text)
    raise ConfigError(
        f"distributed: {JOIN} is {text!r}, expected a whole number of seconds, at least 1"
    )


def _number(env: Mapping[str, str], name: str, names: _Names) -> int:
    text = env.get(name)
    if text is None:
        raise ConfigError(
            f"distributed: {names.rank} is set and {name} is not; unset {names.rank} to train in "
            "one process, or start all processes with a launcher"
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"distributed: {name} is {text!r}, expected a number") from None


def _address(env: Mapping[str, str]) -> Address:
    given = env.get(RENDEZVOUS)
    if given is not None:
        if given.startswith("/"):
            return given
        host, _, port = given.rpartition(":")
        if host and port.isdigit():
            return host, int(port)
        raise ConfigError(f"distributed: {RENDEZVOUS} is {given!r}, expected /path or host:port")
    host, port = env.get("MASTER_ADDR", ""), env.get(PORT) or env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ConfigError(
            "distributed: MASTER_ADDR and MASTER_PORT must say where rank 0 listens; export them, "
            "with the name of the first machine and the number of a free port"
        )
    # torchrun itself listens at MASTER_PORT, so use the next port.
    return host, int(port) if env.get(PORT) else int(port) + 1
