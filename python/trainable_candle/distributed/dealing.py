"""Work that the processes divide among them, so that each part is done only once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trainable_candle.distributed.group import Group

_Item = TypeVar("_Item")
_Found = TypeVar("_Found", float, list[float])

_PIECE: Final = 16 * 2**20
"""`passed_on` exchanges contents in rounds. For a round, a process collects contents until they
have this many bytes or more."""
_LENGTH: Final = 8
"""In a message, the length of each content comes before it and takes this many bytes."""


def measured(
    group: Group, items: Sequence[_Item], measure: Callable[[_Item], _Found]
) -> list[_Found]:
    """Return the results of `measure` for all items, in order; each process measures some items.

    Args:
        group: the processes.
        items: the same items in all processes.
        measure: takes an item; returns a number or a list of numbers.

    Returns:
        The results, the same to the last bit in all processes.

    Raises:
        DistributedError: another process has failed.
    """
    mine = [measure(item) for item in items[group.rank :: group.size]]
    if group.size == 1:
        return mine
    # JSON preserves every bit of a float.
    by_rank = [json.loads(message) for message in group.exchange(json.dumps(mine).encode())]
    # Item `index` was measured by rank `index % size`, as its item number `index // size`.
    return [by_rank[index % group.size][index // group.size] for index in range(len(items))]


def missing_anywhere(group: Group, missing: Iterable[str], order: Iterable[str]) -> list[str]:
    """Return the names that are missing in at least one process; all processes get the same list.

    Callers divide the list: each process makes what the names at the indices `group.rank`,
    `group.rank + group.size` and so on stand for.

    Args:
        group: the processes.
        missing: the names that are missing in this process.
        order: all names that may be missing, in the order of the result; the same in all processes.

    Raises:
        DistributedError: another process has failed.
    """
    messages = group.exchange(json.dumps(list(missing)).encode())
    wanted = {name for message in messages for name in json.loads(message)}
    return [name for name in order if name in wanted]


def passed_on(group: Group, contents: Iterable[bytes]) -> Iterator[bytes]:
    """Send `contents` to all processes; yield the contents of all processes, this one included.

    The processes exchange contents in rounds, so that memory holds only those of one round. All
    processes must call this and exhaust the iterator; all get the contents in the same order.

    Raises:
        DistributedError: another process has failed.
    """
    mine = iter(contents)
    while True:
        parts, size = [], 0
        for content in mine:  # Goes on where the last round stopped.
            parts += [len(content).to_bytes(_LENGTH, "little"), content]
            size += len(content)
            if size >= _PIECE:
                break
        messages = group.exchange(b"".join(parts))
        if not any(messages):  # No process has contents left.
            return
        for message in messages:
            yield from _split(message)


def _split(message: bytes) -> Iterator[bytes]:
    """Yield the contents that `passed_on` has joined to a message."""
    start = 0
    while start < len(message):
        end = start + _LENGTH + int.from_bytes(message[start : start + _LENGTH], "little")
        yield message[start + _LENGTH : end]
        start = end
