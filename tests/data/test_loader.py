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

# Ten items; each has a number and a row of two numbers.
ROWS = TensorDataset(tc.arange(10), tc.arange(20).reshape(10, 2))


def numbers(loader: DataLoader) -> list[list[int]]:
    """Return the first tensor of each batch, which has the numbers of its items."""
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_come_in_order_with_and_without_workers(workers: int) -> None:
    loader = DataLoader(ROWS, batch_size=4, num_workers=workers)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    full_only = DataLoader(ROWS, 4, drop_last=True, num_workers=workers)
    assert len(numbers(full_only)) == len(full_only) == 2


def test_samplers_choose_items_and_batches() -> None:
    assert numbers(DataLoader(ROWS, batch_sampler=[[1, 0], [9]])) == [[1, 0], [9]]
    assert numbers(DataLoader(ROWS, 2, sampler=[3, 1, 2])) == [[3, 1], [2]]


def test_shuffling_follows_the_seed_and_takes_each_item_once() -> None:
    loader = DataLoader(ROWS, batch_size=3, shuffle=True)
    tc.manual_seed(5)
    first, second = numbers(loader), numbers(loader)
    tc.manual_seed(5)
    assert numbers(loader) == first
    assert first != second
    assert sorted(number for batch in first for number in batch) == list(range(10))


def test_workers_read_at_the_same_time() -> None:
    two_readers = threading.Barrier(2, timeout=10)

    class Meeting:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            two_readers.wait()  # Raises an error if no other thread waits within ten seconds.
            return index

    found = [batch.tolist() for batch in DataLoader(Meeting(), num_workers=2)]
    assert found == [[0], [1], [2], [3]]


def test_errors_of_items_reach_the_caller() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError(f"item {index}")

    with pytest.raises(OSError, match="item 0"):
        list(DataLoader(Broken([1, 2, 3]), num_workers=2))


def test_an_iterable_is_batched_and_cannot_be_shuffled() -> None:
    stream = DataLoader((number for number in range(5)), batch_size=2)
    assert [batch.tolist() for batch in stream] == [[0, 1], [2, 3], [4]]
    with pytest.raises(tc.ArgumentError, match="generator has no __len__ and __getitem__"):
        DataLoader((number for number in range(5)), shuffle=True)


def test_without_a_batch_size_items_come_singly() -> None:
    assert list(DataLoader(["a", "b"], batch_size=None)) == ["a", "b"]


def test_default_collate_joins_items_and_keeps_their_containers() -> None:
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


def test_random_parts_are_disjoint_and_have_all_items() -> None:
    parts = random_split(ROWS, [0.75, 0.25])
    # Rounded down, the shares of ten items are 7 and 2. The first part gets the item that is left.
    assert [len(part) for part in parts] == [8, 2]
    taken = [int(part[n][0]) for part in parts for n in range(len(part))]
    assert sorted(taken) == list(range(10))
    with pytest.raises(tc.ArgumentError, match="lengths sum to 9, expected 10"):
        random_split(ROWS, [4, 5])


def test_a_subset_has_the_items_of_its_indices() -> None:
    assert Subset("abc", [2, 0])[0] == "c"


def test_orders_are_drawn_from_the_given_generator() -> None:
    state = tc.get_rng_state()  # of the library's own generator
    generator = tc.Generator().manual_seed(1)
    loader = DataLoader(ROWS, 3, shuffle=True, generator=generator)
    first, second = numbers(loader), numbers(loader)
    generator.manual_seed(1)
    assert numbers(loader) == first
    assert first != second
    parts = random_split(ROWS, [6, 4], generator=generator.manual_seed(2))
    again = random_split(ROWS, [0.6, 0.4], generator=generator.manual_seed(2))
    assert [part.indices for part in parts] == [part.indices for part in again]
    assert tc.get_rng_state() == state
    with pytest.raises(TypeError, match=r"DataLoader: generator is int, expected a tc\.Generator"):
        DataLoader(ROWS, generator=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [2, None])
def test_one_worker_reads_an_iterable(batch_size: int | None) -> None:
    threads = set()

    def items() -> Iterator[int]:
        for number in range(9):
            threads.add(threading.current_thread().name)
            yield number

    expected = list(DataLoader(items(), batch_size))
    threads.clear()
    found = list(DataLoader(items(), batch_size, num_workers=3))
    assert [np.asarray(x).tolist() for x in found] == [np.asarray(x).tolist() for x in expected]
    assert threads == {"loader_0"}  # The first worker.


def test_errors_of_iterables_reach_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("item 1")

    with pytest.raises(OSError, match="item 1"):
        list(DataLoader(items(), num_workers=2))


def test_worker_init_fn_gets_the_number_of_its_worker() -> None:
    called: list[int] = []
    # The loader accepts these options of torch's loader, but ignores them.
    options: Any = {"pin_memory": True, "persistent_workers": True, "prefetch_factor": None}
    loader = DataLoader(ROWS, 2, num_workers=2, worker_init_fn=called.append, **options)
    assert len(numbers(loader)) == 5
    # Perhaps the first worker reads all batches before the second one starts.
    assert sorted(called) in ([0], [0, 1])

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
