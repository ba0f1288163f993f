"""Work that is dealt out to all processes, each part done once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trainable_candle.distributed.group import Group

_Item = TypeVar("_Item")
_Found = TypeVar("_Found", float, list[float])

_PIECE: Final = 16 * 2**20
"""Bytes of each process that are on their way at once; one content may be larger."""
_LENGTH: Final = 8
"""Bytes of a content's length."""


def measured(
    group: Group, items: Sequence[_Item], measure: Callable[[_Item], _Found]
) -> list[_Found]:
    """What `measure` finds for each item, in order; every process measures its part of them.

    Args:
        group: the processes.
        items: the same in all of them.
        measure: from an item to numbers.

    Returns:
        The results, equal to the last bit in all processes.

    Raises:
        DistributedError: another process has failed.
    """
    mine = [measure(item) for item in items[group.rank :: group.size]]
    if group.size == 1:
        return mine
    # A float in JSON is the same float again.
    every = [json.loads(message) for message in group.exchange(json.dumps(mine).encode())]
    return [every[number % group.size][number // group.size] for number in range(len(items))]


def needed(group: Group, missing: Iterable[str], order: Iterable[str]) -> list[str]:
    """What is missing in one of the processes, after all have looked; the same in all of them.

    Of this list each process makes every `group.size`th, from its rank on.

    Args:
        group: the processes.
        missing: here.
        order: all that may be missing, in the same order everywhere.

    Raises:
        DistributedError: another process has failed.
    """
    messages = group.exchange(json.dumps(list(missing)).encode())
    found = {name for message in messages for name in json.loads(message)}
    return [name for name in order if name in found]


def passed_on(group: Group, contents: Iterable[bytes]) -> Iterator[bytes]:
    """The contents of all processes, a few of them at a time.

    All processes call this, and take all that it gives.

    Raises:
        DistributedError: another process has failed.
    """
    mine = iter(contents)
    while True:
        parts, size = [], 0
        for content in mine:
            parts += [len(content).to_bytes(_LENGTH, "little"), content]
            size += len(content)
            if size >= _PIECE:
                break
        messages = group.exchange(b"".join(parts))
        if not any(messages):
            return
        for message in messages:
            yield from _split(message)


def _split(message: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(message):
        end = start + _LENGTH + int.from_bytes(message[start : start + _LENGTH], "little")
        yield message[start + _LENGTH : end]
        start = end
