"""Batches by number."""

import numpy as np
import pytest

from trainable_candle.data import ShuffledBatches
from trainable_candle.errors import ConfigError


@pytest.mark.parametrize(("items", "size"), [(10, 5), (7, 3), (3, 8), (1, 1), (5, 5)])
def test_every_pass_holds_every_item_once(items: int, size: int) -> None:
    batches = ShuffledBatches(items, size, seed=3)
    drawn = np.concatenate([batches.batch(i) for i in range(4 * items)])
    for start in range(0, len(drawn) - items + 1, items):
        assert sorted(drawn[start : start + items]) == list(range(items))


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    forwards = [ShuffledBatches(20, 6, seed=1).batch(i) for i in range(8)]
    again = ShuffledBatches(20, 6, seed=1)
    backwards = [again.batch(i) for i in reversed(range(8))][::-1]
    np.testing.assert_array_equal(forwards, backwards)


def test_passes_and_seeds_differ() -> None:
    one, other = ShuffledBatches(50, 50, seed=0), ShuffledBatches(50, 50, seed=1)
    assert not np.array_equal(one.batch(0), one.batch(1))
    assert not np.array_equal(one.batch(0), other.batch(0))


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_numbers_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"batches: .* expected at least one item"):
        ShuffledBatches(*numbers)
