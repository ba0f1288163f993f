"""Work that is dealt out to all processes, each part done once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainable_candle.distributed.group import Group

_Item = TypeVar("_Item")
_Found = TypeVar("_Found", float, list[float])


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


def shares(
    group: Group, missing: Sequence[_Item], still: Callable[[], Sequence[_Item]]
) -> Iterator[Sequence[_Item]]:
    """What this process has to make of what is missing, a list after the other.

    First comes its part. When all have made theirs comes what it still misses: what others have
    made where it does not see it, in their memory or in a folder of another machine.

    Args:
        group: the processes.
        missing: the same in all of them where they share a folder.
        still: finds what is missing after that.

    Raises:
        DistributedError: another process has failed.
    """
    if group.size == 1:
        yield missing
        return
    group.barrier()  # All have looked before the first one writes.
    yield missing[group.rank :: group.size]
    group.barrier()
    yield still()
