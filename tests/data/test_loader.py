"""The loader of batches."""

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.loader import (
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

ROWS = TensorDataset(tc.arange(10), tc.arange(20).reshape(10, 2))


def firsts(loader: DataLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_come_in_order(workers: int) -> None:
    loader = DataLoader(ROWS, batch_size=4, num_workers=workers)
    assert firsts(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    shorter = DataLoader(ROWS, 4, drop_last=True, num_workers=workers)
    assert len(firsts(shorter)) == len(shorter) == 2
    assert firsts(DataLoader(ROWS, batch_sampler=[[1, 0], [9]])) == [[1, 0], [9]]
    assert firsts(DataLoader(ROWS, 2, sampler=[3, 1, 2])) == [[3, 1], [2]]


def test_shuffling_follows_the_seed_and_takes_each_item_once() -> None:
    loader = DataLoader(ROWS, batch_size=3, shuffle=True)
    tc.manual_seed(5)
    first, second = firsts(loader), firsts(loader)
    tc.manual_seed(5)
    assert firsts(loader) == first != second
    assert sorted(number for batch in first for number in batch) == list(range(10))


def test_workers_read_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=10)

    class Slow:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> int:
            meeting.wait()
            return place

    found = [batch.tolist() for batch in DataLoader(Slow(), num_workers=2)]
    assert found == [[0], [1], [2], [3]]


def test_errors_of_workers_arrive() -> None:
    class Broken(list[int]):
        def __getitem__(self, place: Any) -> Any:
            raise OSError(f"item {place}")

    with pytest.raises(OSError, match="item 0"):
        list(DataLoader(Broken([1, 2, 3]), num_workers=2))


def test_iterables_and_single_items() -> None:
    stream = DataLoader((number for number in range(5)), batch_size=2)
    assert [batch.tolist() for batch in stream] == [[0, 1], [2, 3], [4]]
    assert list(DataLoader(["a", "b"], batch_size=None)) == ["a", "b"]
    with pytest.raises(tc.ArgumentError, match="generator has no __len__ and __getitem__"):
        DataLoader((number for number in range(5)), shuffle=True)


def test_items_are_joined() -> None:
    class Point(NamedTuple):
        x: float
        name: str

    batch = default_collate([Point(1.0, "a"), Point(2.0, "b")])
    assert isinstance(batch, Point)
    assert batch.x.tolist() == [1.0, 2.0]  # type: ignore[attr-defined]
    assert batch.name == ["a", "b"]
    mapped = default_collate([{"a": np.ones(2, np.float32), "b": (tc.ones(1), 2)}] * 3)
    assert mapped["a"].shape == (3, 2)
    assert mapped["b"][0].shape == (3, 1)
    assert mapped["b"][1].tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="default_collate: found object"):
        default_collate([object()])


def test_random_parts_are_disjoint() -> None:
    parts = random_split(ROWS, [0.75, 0.25])
    assert [len(part) for part in parts] == [8, 2]
    taken = [int(part[n][0]) for part in parts for n in range(len(part))]
    assert sorted(taken) == list(range(10))
    assert Subset("abc", [2, 0])[0] == "c"
    with pytest.raises(tc.ArgumentError, match="lengths sum to 9, expected 10"):
        random_split(ROWS, [4, 5])
