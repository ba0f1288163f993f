"""Batches in random order, by number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt


class ShuffledBatches:
    """Which items make up batch `index`: every pass over the items is a fresh shuffle.

    The order depends on the seed and the pass only, so any batch can be asked for at any time.

    Args:
        items: number of items, at least 1.
        batch_size: items in a batch, at least 1; a batch may span two passes.
        seed: at least 0.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(self, items: int, batch_size: int, seed: int) -> None:
        if items < 1 or batch_size < 1 or seed < 0:
            raise ConfigError(
                f"batches: {items} items in batches of {batch_size} with seed {seed}; "
                "expected at least one item, a batch size of at least 1 and a seed of at least 0"
            )
        self._items = items
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, index: int) -> npt.NDArray[np.int64]:
        """The numbers of the items in batch `index`; shape (batch_size,)."""
        first = index * self._batch_size
        numbers = range(first, first + self._batch_size)
        orders = {epoch: self._order(epoch) for epoch in {n // self._items for n in numbers}}
        picked = [orders[n // self._items][n % self._items] for n in numbers]
        return np.array(picked, dtype=np.int64)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order: npt.NDArray[np.int64] = np.random.default_rng([self._seed, epoch]).permutation(
            self._items
        )
        return order
