"""Batches of items in random order; the items of a batch follow from the batch's number."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from trainable_candle.draws import generator, pair
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

_REMEMBERED: Final = 64
"""The number of epochs for which the order of groups, and counts of occurrences, are cached."""


class ShuffledBatches:
    """Batches of the indices of items: every epoch is a new shuffle of the items.

    All items of a batch belong to one group; a batch may contain items of several epochs. In every
    epoch each item occurs `repeats` times; if that is not a whole number, the item occurs once more
    in some epochs, so that its mean number of occurrences is `repeats`. A batch depends only on the
    arguments and on its number, so any batch can be computed at any time.

    Args:
        items: number of items, at least 1.
        batch_size: items in a batch, at least 1.
        seed: at least 0.
        groups: the group of each item, numbered from 0; by default one group for all items.
        repeats: how often each item occurs in an epoch, above 0; by default once.

    Raises:
        ConfigError: a number is out of its range, or `groups` or `repeats` does not have one entry
            for each item.
    """

    def __init__(
        self,
        items: int,
        batch_size: int,
        seed: int,
        groups: Sequence[int] | None = None,
        repeats: Sequence[float] | None = None,
    ) -> None:
        if items < 1 or batch_size < 1 or seed < 0:
            raise ConfigError(
                f"batches: {items} items in batches of {batch_size} with seed {seed}; "
                "expected at least one item, a batch size of at least 1 and a seed of at least 0"
            )
        group_of = np.zeros(items, np.int64) if groups is None else np.asarray(groups, np.int64)
        repeats_of = np.ones(items) if repeats is None else np.asarray(repeats, np.float64)
        have_right_shapes = group_of.shape == (items,) and repeats_of.shape == (items,)
        if not have_right_shapes or not (repeats_of > 0).all():
            smallest = f", the smallest of them {repeats_of.min():g}" if repeats_of.size else ""
            raise ConfigError(
                f"batches: {items} items with {group_of.size} groups and {repeats_of.size} repeats"
                f"{smallest}; expected one group and one number of repeats for each item, and "
                "repeats above 0"
            )
        self._batch_size = batch_size
        self._seed = seed
        self._groups = [
            _Group(seed, number, np.flatnonzero(group_of == number), repeats_of)
            for number in sorted(set(group_of.tolist()))
        ]
        self._order = lru_cache(maxsize=_REMEMBERED)(self._shuffled_groups)

    def batch(self, index: int) -> npt.NDArray[np.int64]:
        """Return the indices of the items in batch number `index`; shape (batch_size,)."""
        epoch = _last(lambda epoch: self.first_batch(epoch) <= index)
        position = index - self.first_batch(epoch)
        order = self._order(epoch)
        group_index = int(order[position])
        group = self._groups[group_index]
        # The number of earlier batches of this group.
        earlier = self._batches_before(group, epoch) + int((order[:position] == group_index).sum())
        return group.members(earlier * self._batch_size, self._batch_size)

    def first_batch(self, epoch: int) -> int:
        """Return the number of the first batch of an epoch; epochs are counted from 0.

        If the last items of a group in an epoch do not fill a batch, the first batch of this group
        in the next epoch begins with them.
        """
        return sum(self._batches_before(group, epoch) for group in self._groups)

    def _batches_before(self, group: _Group, epoch: int) -> int:
        """Return how many batches the group's items of earlier epochs fill."""
        return group.occurrences_before(epoch) // self._batch_size

    def _shuffled_groups(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return, for each batch of an epoch, the index of its group in `_groups`."""
        counts = [
            self._batches_before(group, epoch + 1) - self._batches_before(group, epoch)
            for group in self._groups
        ]
        rng = generator(self._seed, "order", epoch)
        order: npt.NDArray[np.int64] = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        return order


class _Group:
    """The endless sequence of a group's items, epoch after epoch.

    Args:
        seed: the seed of the order.
        number: the group's number.
        items: the indices of the group's items.
        repeats: the repeats of the items of all groups.
    """

    def __init__(
        self,
        seed: int,
        number: int,
        items: npt.NDArray[np.int64],
        repeats: npt.NDArray[np.float64],
    ) -> None:
        self._seed = seed
        self._number = number
        self._items = items
        self._repeats = repeats[items]
        # If items occur only in every n-th epoch, these phases put them into different epochs.
        self._phases = (np.arange(len(items)) + 0.5) / len(items)
        # Two epochs, because the items of a batch may end one epoch and begin the next.
        self._items_in = lru_cache(maxsize=2)(self._shuffled)
        self.occurrences_before = lru_cache(maxsize=_REMEMBERED)(self._occurrences_before)

    def members(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` items from position `start` of the sequence."""
        epoch = _last(lambda epoch: self.occurrences_before(epoch) <= start)
        skipped = start - self.occurrences_before(epoch)
        parts, missing = [], count
        while missing:
            part = self._items_in(epoch)[skipped : skipped + missing]
            parts.append(part)
            missing -= len(part)
            epoch, skipped = epoch + 1, 0
        return np.concatenate(parts)

    def _occurrences_before(self, epoch: int) -> int:
        """Return how often the items occur in all epochs before this one, in total."""
        return int(self._counts_before(epoch).sum())

    def _counts_before(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return how often each item occurs in all epochs before this one."""
        # The tiny addend offsets rounding errors: in floating point, three epochs of 0.3 repeats
        # plus the phase 0.1 are slightly less than 1.
        return np.floor(epoch * self._repeats + self._phases + 1e-9).astype(np.int64)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the items of an epoch in their random order."""
        counts = self._counts_before(epoch + 1) - self._counts_before(epoch)
        members = np.repeat(self._items, counts)
        # `pair` packs the group's number and the epoch into one integer.
        rng = generator(self._seed, "items", pair(self._number, epoch))
        order: npt.NDArray[np.int64] = members[rng.permutation(len(members))]
        return order


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest integer n for which `holds(n)` is true.

    `holds` must be true for all integers from 0 to n, and false above n.
    """
    above = 1
    while holds(above):
        above *= 2
    # Find the first number for which `holds` is false; the number before it is the last.
    return bisect_left(range(above), True, key=lambda number: not holds(number)) - 1
