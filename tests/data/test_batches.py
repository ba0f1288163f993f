"""`ShuffledBatches` computes the items of any batch from the batch's number and the settings."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from trainable_candle.data import ShuffledBatches
from trainable_candle.errors import ConfigError


@pytest.mark.parametrize(("items", "size"), [(10, 5), (7, 3), (3, 8), (1, 1), (5, 5)])
def test_every_epoch_holds_every_item_once(items: int, size: int) -> None:
    batches = ShuffledBatches(items, size, seed=3)
    drawn = np.concatenate([batches.batch(i) for i in range(4 * items)])
    for start in range(0, len(drawn) - items + 1, items):
        assert sorted(drawn[start : start + items]) == list(range(items))


def test_a_batch_does_not_depend_on_earlier_calls() -> None:
    forwards = [ShuffledBatches(20, 6, seed=1).batch(i) for i in range(8)]
    batches = ShuffledBatches(20, 6, seed=1)
    backwards = [batches.batch(i) for i in reversed(range(8))][::-1]
    np.testing.assert_array_equal(forwards, backwards)


def test_orders_differ_between_epochs_and_seeds() -> None:
    one, other = ShuffledBatches(50, 50, seed=0), ShuffledBatches(50, 50, seed=1)
    assert not np.array_equal(one.batch(0), one.batch(1))
    assert not np.array_equal(one.batch(0), other.batch(0))


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 0), (1, 0, 0), (1, 1, -1)],
    ids=["no items", "batch size 0", "negative seed"],
)
def test_impossible_numbers_are_rejected(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"batches: .* expected at least one item"):
        ShuffledBatches(*numbers)


# The group of each item. Groups 3 and 4 have no items.
GROUPS = [0, 1, 0, 2, 1, 0, 0, 0, 1, 0, 5]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_batch_has_one_group_and_every_item_occurs_equally_often(size: int) -> None:
    batches = ShuffledBatches(len(GROUPS), size, seed=5, groups=GROUPS)
    drawn = [batches.batch(index).tolist() for index in range(batches.first_batch(10 * size))]
    assert all(len(batch) == size for batch in drawn)
    assert all(len({GROUPS[item] for item in batch}) == 1 for batch in drawn)
    # In `size` epochs, the n items of a group occur n * `size` times in all, which fills n whole
    # batches. So the batches of 10 * `size` epochs contain each item exactly 10 * `size` times.
    assert Counter(item for batch in drawn for item in batch) == dict.fromkeys(
        range(len(GROUPS)), 10 * size
    )
    # Each epoch has every member of a group once.
    for group in set(GROUPS):
        count = GROUPS.count(group)
        members = [item for batch in drawn for item in batch if GROUPS[item] == group]
        for start in range(0, len(members) - count + 1, count):
            assert len(set(members[start : start + count])) == count


def test_groups_are_mixed_within_an_epoch() -> None:
    groups = [0] * 50 + [1] * 50
    batches = ShuffledBatches(100, 5, seed=0, groups=groups)
    order = [groups[batches.batch(index)[0]] for index in range(20)]
    changes = sum(one != other for one, other in pairwise(order))
    # Of 20 batches in two groups: about 10 changes if they are mixed, 1 if they are not.
    assert 5 <= changes <= 15
    # The second epoch has another order.
    assert order != [groups[batches.batch(index)[0]] for index in range(20, 40)]


def test_an_item_occurs_as_often_as_its_repeats_say_on_average() -> None:
    repeats = [1.0, 3.0, 0.1, 0.5, 2.5, 0.5]
    batches = ShuffledBatches(6, 1, seed=2, repeats=repeats)
    totals: Counter[int] = Counter()
    for epoch in range(20):
        indices = range(batches.first_batch(epoch), batches.first_batch(epoch + 1))
        seen = Counter(int(batches.batch(index)[0]) for index in indices)
        # In each epoch, a fraction is rounded down or up.
        for item, often in enumerate(repeats):
            assert int(often) <= seen[item] <= np.ceil(often)
        totals.update(seen)
    assert [totals[item] for item in range(6)] == [20, 60, 2, 10, 50, 10]


def test_with_half_a_repeat_an_epoch_has_half_of_the_items() -> None:
    batches = ShuffledBatches(8, 1, seed=0, repeats=[0.5] * 8)
    assert [batches.first_batch(epoch) for epoch in range(5)] == [0, 4, 8, 12, 16]


def test_batches_with_groups_and_repeats_do_not_depend_on_earlier_calls() -> None:
    repeats = [1.0, 2.0, 0.25, 1.0, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0, 0.1]
    forwards = ShuffledBatches(11, 3, seed=9, groups=GROUPS, repeats=repeats)
    expected = [forwards.batch(index).tolist() for index in range(60)]
    for index in (59, 3, 30, 0):
        assert (
            ShuffledBatches(11, 3, seed=9, groups=GROUPS, repeats=repeats).batch(index).tolist()
            == expected[index]
        )


@pytest.mark.parametrize(
    "more",
    [{"groups": [0]}, {"repeats": [1.0, 0.0]}, {"repeats": [1.0]}, {"repeats": [1, np.nan]}],
    ids=str,
)
def test_impossible_groups_and_repeats_are_rejected(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="batches: 2 items with"):
        ShuffledBatches(2, 1, seed=0, **more)
