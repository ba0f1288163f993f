"""The group of processes that train together: they add up tensors, exchange messages and wait."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.world import World


class Group(Protocol):
    """Processes that run the same program in lockstep, each with its own part of the data.

    Except for `fail`, `in_step` and `close`, methods raise `DistributedError` if another process
    has failed.
    """

    rank: int
    """The number of this process, from 0."""
    size: int
    """The number of processes."""
    local_size: int
    """The number of processes on this machine."""

    def sum_gradients(self, parameters: Mapping[str, Var], tail: Tensor) -> Tensor:
        """Add up the gradients of all processes, in place.

        `tail` holds further numbers of this process, such as its loss; the result is the sum of
        the tails of all processes.
        """

    def broadcast_(self, parameters: Mapping[str, Var]) -> None:
        """Set the variables to the values that they have in rank 0."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a message to all processes; returns the messages of all processes, by rank."""

    def barrier(self) -> None:
        """Wait until all processes have called this."""

    def wait(self) -> None:
        """Wait until the GPU has done all queued work."""

    def fail(self, reason: str) -> None:
        """Make all processes end; their error messages give the reason."""

    def in_step(self) -> AbstractContextManager[None]:
        """Return a context for one step; a process whose step takes too long counts as failed."""

    def close(self) -> None:
        """Leave the group."""


class Alone:
    """The group of one process."""

    rank, size, local_size = 0, 1, 1

    def sum_gradients(self, _parameters: Mapping[str, Var], tail: Tensor) -> Tensor:
        """Return the tail; there is nothing to add."""
        return tail

    def broadcast_(self, parameters: Mapping[str, Var]) -> None:
        """Do nothing: rank 0 is this process."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the message of this process alone."""
        return [message]

    def barrier(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def wait(self) -> None:
        """Do nothing: a single process waits for the GPU when it reads a result."""

    def fail(self, reason: str) -> None:
        """Do nothing: there are no other processes."""

    def in_step(self) -> AbstractContextManager[None]:
        """Return a context without a time limit, because no other process waits for this one."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""


ALONE: Final = Alone()
"""The group to pass to a function if this process is to do all the work."""


@contextmanager
def first_before_others(group: Group) -> Iterator[None]:
    """Return a context that the other ranks enter after rank 0 has left it.

    The other ranks thus find the files that rank 0 has written in its context.

    Raises:
        DistributedError: another process has failed.
    """
    if group.rank > 0:
        group.barrier()
    yield
    if group.rank == 0:
        group.barrier()


def make_group(world: World | None, device: str, facts: Mapping[str, str], **options: Any) -> Group:
    """Return the group of this process; without a launcher (`world` is None), the process alone.

    Args:
        world: the rank of this process, among all and on its machine, and where they meet.
        device: the device on which this process computes; not `auto`.
        facts: what must be equal in all processes, by name.
        options: further keyword arguments of `Processes`, the group of several processes: the
            dtype in which GPUs exchange gradients, and the time limit of a step.

    Raises:
        DistributedError: the processes do not find each other, their versions, kinds of device or
            `facts` differ, another process has failed, or a test sum over the GPUs is wrong.
        CudaUnavailableError: NCCL cannot be used.
    """
    if world is None:
        return Alone()

    # Imported only here, so that a single process does not spend time on importing sockets.
    from trainable_candle.distributed.processes import Processes  # noqa: PLC0415

    return Processes(world, device, facts, **options)
