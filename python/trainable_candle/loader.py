"""Data sets, and a loader that prepares their batches in threads, like `torch.utils.data`.

Also available as `tc.utils.data`.

```python
rows = tc.loader.TensorDataset(tc.randn(10, 4), tc.randn(10, 2))
for inputs, targets in tc.loader.DataLoader(rows, 5, shuffle=True, num_workers=2):
    F.mse_loss(model(inputs), targets).backward()
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise, repeat
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from trainable_candle import _core
from trainable_candle._explained import explained
from trainable_candle._functions import randperm
from trainable_candle._generator import drawing
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainable_candle._core import Tensor
    from trainable_candle._generator import Generator

__all__ = [
    "DataLoader",
    "Dataset",
    "Subset",
    "TensorDataset",
    "default_collate",
    "random_split",
]

_END = object()
"""The result of a task after the last batch of an iterable."""


class Dataset:
    """An optional base class of data sets; a `DataLoader` takes any sequence or iterable.

    A subclass must define `__len__` and `__getitem__`.

        class Squares(tc.loader.Dataset):
            def __len__(self):
                return 10

            def __getitem__(self, place):
                return place**2

        assert next(iter(tc.loader.DataLoader(Squares(), 3))).tolist() == [0, 1, 4]
    """

    def __getitem__(self, place: int) -> Any:
        """Return the item at an index."""
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__()")

    def __len__(self) -> int:
        """Return how many items there are."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")


class TensorDataset(Dataset):
    """The rows of several tensors of equal length: item i is the tuple of row i of each tensor.

        rows = tc.loader.TensorDataset(tc.randn(10, 4), tc.arange(10))
        features, label = rows[3]

    Raises:
        ShapeError: If the lengths differ, there is no tensor, or a tensor has no dimensions.
    """

    @explained
    def __init__(self, *tensors: Tensor) -> None:
        if not all(tensor.ndim for tensor in tensors):
            raise ShapeError("TensorDataset: a tensor has no dimension; expected rows, (n, ...)")
        lengths = {tensor.shape[0] for tensor in tensors}
        if len(lengths) != 1:
            raise ShapeError(
                f"TensorDataset: found lengths {sorted(lengths)}, expected tensors of one length"
            )
        self.tensors = tensors

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        """Return the tuple of each tensor's row `place`."""
        return tuple(tensor[place] for tensor in self.tensors)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self.tensors[0].shape[0]


class Subset(Dataset):
    """Some items of a data set.

        assert list(tc.loader.Subset("abc", [2, 0])) == ["c", "a"]

    Args:
        dataset: The data set.
        indices: The indices of the items, in order.
    """

    @explained
    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, place: int) -> Any:
        """Return the item of the data set whose index is `indices[place]`."""
        return self.dataset[self.indices[place]]

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.indices)


@explained
def random_split(
    dataset: Any, lengths: Sequence[float], generator: Generator | None = None
) -> list[Subset]:
    """Divide a data set at random into subsets that share no item.

        train, validation = tc.loader.random_split(range(10), [0.8, 0.2])
        assert len(train) == 8

    Args:
        dataset: The data set.
        lengths: The number of items of each subset, or fractions of the items that sum to 1.
            Fractions are rounded down to whole items; then each of the first subsets gets one of
            the remaining items.
        generator: Draws the order; default: the library's own (see `manual_seed`).

    Raises:
        TypeError: If a number of items is not whole.
        ArgumentError: If a length is negative, or the lengths sum neither to the number of items
            nor, as fractions, to 1.
    """
    items, wanted = len(dataset), list(lengths)
    if any(length < 0 for length in wanted):
        raise ArgumentError(f"random_split: lengths are {wanted}, expected none below 0")
    if any(isinstance(length, float) for length in wanted) and abs(sum(wanted) - 1) < 1e-6:
        counts = [int(items * fraction) for fraction in wanted]
        for number in range(items - sum(counts)):
            counts[number % len(counts)] += 1
        wanted = [*counts]
    if sum(wanted) != items:
        raise ArgumentError(
            f"random_split: lengths sum to {sum(wanted)}, expected {items}, or 1 for fractions"
        )
    order = randperm(items, generator=generator).tolist()
    bounds = np.cumsum([0, *(index(length) for length in wanted)]).tolist()  # type: ignore[arg-type]
    return [Subset(dataset, order[start:end]) for start, end in pairwise(bounds)]


@explained
def default_collate(items: Sequence[Any]) -> Any:
    """Join items into a batch: tensors, arrays and numbers are stacked in a new first dimension.

    Tuples, lists and mappings are joined entry by entry; strings and bytes become a list. The type
    of the first item decides.

        batch = tc.loader.default_collate([(tc.zeros(2), 1), (tc.ones(2), 2)])
        assert batch[0].shape == (2, 2)

    Raises:
        TypeError: If an item is of another type.
        ArgumentError: If there is no item, or the items differ in the names or the number of their
            entries, or in the shapes of arrays.
        ShapeError, DTypeError: If tensors differ in shape or dtype.
    """
    if not items:
        raise ArgumentError("default_collate: found no items, expected at least one")
    first = items[0]
    if isinstance(first, _core.Tensor):
        return _core.stack(list(items))
    if isinstance(first, (np.ndarray, np.generic)):
        return _core.tensor(np.stack(items))
    if isinstance(first, (bool, int, float)):
        return _core.tensor(list(items))
    if isinstance(first, (str, bytes)):
        return list(items)
    if isinstance(first, Mapping):
        _require_alike([tuple(item) for item in items], "names")
        return {name: default_collate([item[name] for item in items]) for name in first}
    if isinstance(first, Sequence):
        _require_alike([len(item) for item in items], "number of entries")
        columns = [default_collate(column) for column in zip(*items, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return tuple(columns) if isinstance(first, tuple) else columns
    raise TypeError(
        f"default_collate: found {type(first).__name__}, expected tensors, arrays, numbers, texts, "
        "or tuples or mappings of them; give a collate_fn"
    )


def _require_alike(found: Sequence[Any], what: str) -> None:
    """Check that `found` has equal values: tuples of names, in any order, or numbers of entries."""
    first = found[0]
    different = next((item for item in found if _unordered(item) != _unordered(first)), None)
    if different is not None:
        raise ArgumentError(
            f"default_collate: the items differ in their {what}, {first} and {different}; give a "
            "collate_fn that makes them alike"
        )


def _unordered(value: Any) -> Any:
    """Return a tuple of names as a set, and a number of entries as it is."""
    return set(value) if isinstance(value, tuple) else value


class DataLoader:
    """Batches of a sequence or of an iterable; each `for` loop over the loader is a new epoch.

    The workers are threads, because reading files, decoding and numpy release the interpreter's
    lock and so run in parallel with training. Only one worker reads an iterable. A batch is on the
    device of its items.

        rows = tc.loader.TensorDataset(tc.randn(10, 4), tc.randn(10, 2))
        for inputs, targets in tc.loader.DataLoader(rows, 5, shuffle=True, num_workers=2):
            F.mse_loss(model(inputs), targets).backward()

    Args:
        dataset: Anything with `__len__` and `__getitem__`, or an iterable.
        batch_size: The number of items of a batch; None for single items instead of batches.
        shuffle: Whether the items of each epoch come in a new random order.
        sampler: The indices of the items of an epoch, in order; excludes `shuffle`.
        batch_sampler: A list of indices for each batch; excludes `batch_size`, `shuffle`,
            `sampler` and `drop_last`.
        num_workers: The number of threads that prepare batches in advance; 0 for none.
        collate_fn: Turns a list of items into a batch; default: `default_collate`.
        drop_last: Whether to leave out a last batch of fewer than `batch_size` items.
        prefetch_factor: `num_workers` times this number of batches are prepared in advance;
            default 2.
        generator: Draws the random orders; default: the library's own (see `manual_seed`).
        worker_init_fn: Each worker calls it with its own number, counted from 0, before its first
            batch of an epoch.
        pin_memory: Ignored, because the library manages pinned memory itself.
        persistent_workers: Ignored, because threads start quickly.

    Raises:
        TypeError: If `generator` is not a `Generator`, or a number is not whole.
        ArgumentError: If arguments exclude each other, a number is out of range, or `shuffle` or a
            sampler is given for an iterable.
    """

    @explained
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        prefetch_factor: int | None = None,
        *,
        generator: Generator | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        del pin_memory, persistent_workers
        drawing("DataLoader", generator)  # Raises an error if it is no `Generator`.
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            if value is not None and index(value) < least:
                raise ArgumentError(f"DataLoader: {name} is {value}, expected at least {least}")
        if shuffle and sampler is not None:
            raise ArgumentError("DataLoader: a sampler gives the order; leave out shuffle")
        if batch_sampler is not None and (
            shuffle or sampler is not None or batch_size != 1 or drop_last
        ):
            raise ArgumentError(
                "DataLoader: a batch_sampler gives the batches; leave out batch_size, shuffle, "
                "sampler and drop_last"
            )
        if batch_size is None and drop_last:
            raise ArgumentError(
                "DataLoader: without batch_size there are no batches; leave out drop_last"
            )
        self.is_sequence = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not self.is_sequence and (shuffle or sampler is not None or batch_sampler is not None):
            raise ArgumentError(
                f"DataLoader: {type(dataset).__name__} has no __len__ and __getitem__, so it is "
                "read in its own order; leave out shuffle and samplers"
            )
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.sampler, self.batch_sampler, self.drop_last = sampler, batch_sampler, drop_last
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor or 2
        self.generator, self.worker_init_fn = generator, worker_init_fn
        self.collate_fn = collate_fn or default_collate

    def __len__(self) -> int:
        """Return how many batches an epoch has, or how many items if `batch_size` is None.

        Raises:
            TypeError: If the data set or the sampler has no length.
        """
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]  # a list, most often
        items = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        if self.batch_size is None:
            return items
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch."""
        if not self.is_sequence:
            batches = (self._joined(items) for items in self._grouped(iter(self.dataset)))
            if not self.num_workers:
                return batches
            # One worker, because a generator cannot run in two threads at once.
            return self._ahead(repeat(partial(next, batches, _END)), 1)
        if self.num_workers:
            tasks = (partial(self._read, indices) for indices in self._indices())
            return self._ahead(tasks, self.num_workers)
        return (self._read(indices) for indices in self._indices())

    def _indices(self) -> Iterator[Any]:
        """Return a list of indices for each batch, or single indices if `batch_size` is None."""
        if self.batch_sampler is not None:
            return iter(self.batch_sampler)
        if self.sampler is not None:
            return self._grouped(iter(self.sampler))
        items = len(self.dataset)
        if not self.shuffle:
            return self._grouped(iter(range(items)))
        return self._grouped(iter(randperm(items, generator=self.generator).tolist()))

    def _grouped(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield lists of `batch_size` items, or the items if `batch_size` is None."""
        if self.batch_size is None:
            yield from items
            return
        batch: list[Any] = []
        for item in items:
            batch.append(item)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def _read(self, indices: Any) -> Any:
        """Return the batch for an entry of `_indices`, or the item if `batch_size` is None."""
        if self.batch_size is None and self.batch_sampler is None:
            return self._joined(self.dataset[indices])
        return self._joined([self.dataset[i] for i in indices])

    def _joined(self, items: Any) -> Any:
        """Return the batch of a list of items, or of one item if `batch_size` is None."""
        is_single = self.batch_size is None and self.batch_sampler is None
        if is_single and self.collate_fn is default_collate:
            return items
        return self.collate_fn(items)

    def _ahead(self, tasks: Iterator[Callable[[], Any]], threads: int) -> Iterator[Any]:
        """Yield the results of tasks in order, until one is `_END`; workers run the next tasks."""
        waiting, worker_numbers = deque[Any](), count()
        preparation = _Preparation(lambda: (self.worker_init_fn or _nothing)(next(worker_numbers)))
        with ThreadPoolExecutor(threads, "loader", initializer=preparation) as workers:
            try:
                for task in tasks:
                    waiting.append(workers.submit(preparation.then, task))
                    if len(waiting) >= self.num_workers * self.prefetch_factor:
                        if (batch := waiting.popleft().result()) is _END:
                            return
                        yield batch
                # Only an endless series of tasks returns `_END`, and it never reaches this loop.
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def _nothing(number: int) -> None:
    """Do nothing, in place of a `worker_init_fn`."""


class _Preparation:
    """Prepares each worker when called; if this fails once, all later tasks raise the error."""

    def __init__(self, prepare: Callable[[], Any]) -> None:
        self._prepare = prepare
        self._error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._prepare()
        except BaseException as error:  # noqa: BLE001 - `then` raises it
            self._error = error

    def then(self, task: Callable[[], Any]) -> Any:
        """Run a task in a prepared worker and return its result."""
        if self._error is not None:
            raise self._error
        return task()
