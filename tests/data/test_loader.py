"""`DataLoader`, `TensorDataset`, `Subset`, `random_split` and `default_collate`."""

import threading
from collections.abc import Callable, Iterator
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


def test_errors_of_workers_reach_the_caller() -> None:
    class Broken(list[int]):
        def __getitem__(self, place: Any) -> Any:
            raise OSError(f"item {place}")

    with pytest.raises(OSError, match="item 0"):
        list(DataLoader(Broken([1, 2, 3]), num_workers=2))


def test_iterables_are_batched_and_items_are_given_singly() -> None:
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


def test_orders_are_drawn_from_the_given_generator() -> None:
    state = tc.get_rng_state()
    generator = tc.Generator().manual_seed(1)
    loader = DataLoader(ROWS, 3, shuffle=True, generator=generator)
    first, second = firsts(loader), firsts(loader)
    generator.manual_seed(1)
    assert firsts(loader) == first != second
    parts = random_split(ROWS, [6, 4], generator=generator.manual_seed(2))
    again = random_split(ROWS, [0.6, 0.4], generator=generator.manual_seed(2))
    assert [part.indices for part in parts] == [part.indices for part in again]
    assert tc.get_rng_state() == state
    with pytest.raises(TypeError, match=r"DataLoader: generator is int, expected a tc\.Generator"):
        DataLoader(ROWS, generator=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_worker_reads_an_iterable_once_and_ahead(batch_size: int | None) -> None:
    threads = set()

    def items() -> Iterator[int]:
        for number in range(9):
            threads.add(threading.current_thread().name)
            yield number

    alone = list(DataLoader(items(), batch_size))
    threads.clear()
    found = list(DataLoader(items(), batch_size, num_workers=3))
    assert [np.asarray(x).tolist() for x in found] == [np.asarray(x).tolist() for x in alone]
    assert threads == {"loader_0"}


def test_errors_of_iterables_reach_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("item 1")

    with pytest.raises(OSError, match="item 1"):
        list(DataLoader(items(), num_workers=2))


def test_worker_init_fn_is_called_in_workers() -> None:
    numbers: list[int] = []
    options: Any = {"pin_memory": True, "persistent_workers": True, "prefetch_factor": None}
    loader = DataLoader(ROWS, 2, num_workers=2, worker_init_fn=numbers.append, **options)
    assert len(firsts(loader)) == 5
    assert sorted(numbers) in ([0], [0, 1])

    def broken(number: int) -> None:
        raise OSError(f"worker {number}")

    with pytest.raises(OSError, match="worker 0"):
        list(DataLoader(ROWS, num_workers=1, worker_init_fn=broken))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DataLoader(ROWS, batch_sampler=[[1]], drop_last=True), "leave out batch_size"),
        (lambda: DataLoader(ROWS, None, drop_last=True), "leave out drop_last"),
        (lambda: random_split(ROWS, [12, -2]), r"lengths are \[12, -2\], expected none below 0"),
        (lambda: random_split(ROWS, [1.5, -0.5]), "expected none below 0"),
        (lambda: default_collate([]), "default_collate: found no items"),
        (
            lambda: default_collate([{"a": 1}, {"b": 1}]),
            r"differ in their names, \('a',\) and \('b',\); give",
        ),
        (lambda: default_collate([[1], [1, 2]]), "their number of entries, 1 and 2; give a"),
        (lambda: TensorDataset(tc.ones(2), tc.tensor(1.0)), "a tensor has no dimension"),
    ],
)
def test_wrong_arguments_are_reported(call: Callable[[], object], message: str) -> None:
    with pytest.raises(tc.Error, match=message):
        call()
