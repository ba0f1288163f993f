"""The processes that train together: what each step needs of the others."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.world import World


class Group(Protocol):
    """Processes that do the same at the same time, each with its own part of the data."""

    rank: int
    """Which of them this is, from 0."""
    size: int
    local_size: int
    """Processes on this machine."""

    def sum_gradients(self, parameters: Mapping[str, Var], tail: Tensor) -> Tensor:
        """Add up the gradients of all processes, in place; returns the sum of the tails."""

    def broadcast_(self, parameters: Mapping[str, Var]) -> None:
        """Give the variables their values of rank 0."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all processes, by rank."""

    def barrier(self) -> None:
        """Wait until all processes are here."""

    def wait(self) -> None:
        """Wait until what is queued on the GPU is done."""

    def fail(self, reason: str) -> None:
        """Let all processes end."""

    def in_step(self) -> AbstractContextManager[None]:
        """The context of a step, which must not take for ever."""

    def close(self) -> None:
        """Leave the group."""


class Alone:
    """The group of one process."""

    rank, size, local_size = 0, 1, 1

    def sum_gradients(self, _parameters: Mapping[str, Var], tail: Tensor) -> Tensor:
        """The tail; there is nothing to add."""
        return tail

    def broadcast_(self, parameters: Mapping[str, Var]) -> None:
        """Nothing: rank 0 is this process."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def exchange(self, message: bytes) -> list[bytes]:
        """The message."""
        return [message]

    def barrier(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing: reading a value waits for the GPU."""

    def fail(self, reason: str) -> None:
        """Nobody to tell."""

    def in_step(self) -> AbstractContextManager[None]:
        """Nobody waits for this process."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to leave."""


ALONE: Final = Alone()
"""One process, for what may be shared out and is not."""


@contextmanager
def first_before_others(group: Group) -> Iterator[None]:
    """A context that rank 0 leaves before the others enter it: they find what it has kept.

    Raises:
        DistributedError: another process has failed.
    """
    if group.rank > 0:
        group.barrier()
    yield
    if group.rank == 0:
        group.barrier()


def make_group(world: World | None, device: str, facts: Mapping[str, str], **options: Any) -> Group:
    """The group of this process: alone where no launcher has given it a place.

    Raises:
        DistributedError: the processes do not find each other, or differ.
        CudaUnavailableError: NCCL cannot be used.
    """
    if world is None:
        return Alone()

    # Imported where it is needed: one process waits for no sockets.
    from trainable_candle.distributed.processes import Processes  # noqa: PLC0415

    return Processes(world, device, facts, **options)
