"""One copy of the weights in host memory for the processes of a machine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainable_candle import _core

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainable_candle.distributed.group import Group


def machine() -> str:
    """A name that is the same in all processes that can share memory; empty if unknown."""
    return _core.memory_machine() or ""


def least_sharing(machines: Sequence[str]) -> int:
    """The smallest number of processes that share a copy, given the `machine` of each."""
    return min(machines.count(name) if name else 1 for name in machines)


@contextmanager
def shared_streams(group: Group) -> Iterator[None]:
    """A context in which models share what they stream from host memory.

    All processes of the group enter it, and load the same models in it, in the same order.

    Raises:
        DistributedError: another process has failed.
    """
    if group.size == 1:
        yield
        return
    _core.share_streamed(group.rank, group.exchange)
    try:
        yield
    finally:
        _core.share_streamed()
