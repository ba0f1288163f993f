"""Batches of any sequence, as `torch.utils.data` makes them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainable_candle import Generator, Tensor

__all__ = ["DataLoader", "Dataset", "TensorDataset", "default_collate"]

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Dataset(Protocol[T_co]):
    """Anything with a length and items by number: a list, an array, a class of yours."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitem__(self, index: int, /) -> T_co:
        """Return an item."""


class TensorDataset:
    """Rows of several tensors that belong together.

    Args:
        tensors: Of the same first size.

    Raises:
        ShapeError: If their first sizes differ.
    """

    def __init__(self, *tensors: Tensor) -> None:
        sizes = {tensor.shape[0] for tensor in tensors}
        if len(sizes) != 1:
            found = ", ".join(str(tensor.shape) for tensor in tensors)
            raise ShapeError(f"TensorDataset: found the shapes {found}, expected one first size")
        self.tensors = tensors

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.tensors[0].shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a row of each tensor."""
        return tuple(tensor[index] for tensor in self.tensors)


def default_collate(items: Sequence[Any]) -> Any:
    """Join items into a batch, as torch does.

    Tensors, arrays and numbers become a tensor with one more dimension; in tuples, lists and
    mappings each entry is joined by itself; texts become a list.

    Raises:
        ArgumentError: If items are of another kind, or of several.
    """
    first = items[0]
    if isinstance(first, tc.Tensor):
        return tc.stack(list(items))
    if isinstance(first, (np.ndarray, np.generic)):
        return tc.tensor(np.stack(items))
    if isinstance(first, (bool, int, float)):
        return tc.tensor(list(items))
    if isinstance(first, str):
        return list(items)
    if isinstance(first, Mapping):
        return {name: default_collate([item[name] for item in items]) for name in first}
    if isinstance(first, Sequence):
        columns = [default_collate(list(column)) for column in zip(*items, strict=True)]
        return tuple(columns) if isinstance(first, tuple) else columns
    raise ArgumentError(
        f"DataLoader: an item is {type(first).__name__}; give a collate_fn, or return tensors, "
        "arrays, numbers, texts, or tuples, lists or mappings of them"
    )


class DataLoader(Generic[T_co]):
    """Batches of a data set, in order or shuffled.

    Items are read and joined by `num_workers` threads ahead of their use: reading files, decoding
    pictures and numpy run beside the training. The order does not depend on their number.

    Args:
        dataset: Anything with a length and items by number.
        batch_size: Items of a batch; None gives single items.
        shuffle: Whether each pass has another order, drawn from `generator`.
        sampler: Numbers of items in the order of a pass, in place of `shuffle`.
        num_workers: Threads; 0 reads when a batch is asked for.
        collate_fn: From a list of items to a batch; default `default_collate`.
        drop_last: Whether an incomplete last batch is left out.
        prefetch_factor: Batches that each thread reads ahead.
        generator: What the order is drawn from; default the library's (`manual_seed`).

    Raises:
        ArgumentError: If a number is out of range, or there is a sampler beside `shuffle`.

    Example:
        >>> rows = [(float(i), i) for i in range(5)]
        >>> [labels.tolist() for _, labels in tc.utils.data.DataLoader(rows, batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[T_co]], Any] | None = None,
        drop_last: bool = False,
        prefetch_factor: int = 2,
        generator: Generator | None = None,
    ) -> None:
        least = {"batch_size": batch_size, "prefetch_factor": prefetch_factor}
        for name, value in least.items():
            if value is not None and value < 1:
                raise ArgumentError(f"DataLoader: {name} is {value}, expected at least 1")
        if num_workers < 0:
            raise ArgumentError(f"DataLoader: num_workers is {num_workers}, expected at least 0")
        if sampler is not None and shuffle:
            raise ArgumentError("DataLoader: found a sampler and shuffle; give one of them")
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last
        self._shuffle = shuffle
        self._sampler = sampler
        self._collate = default_collate if collate_fn is None else collate_fn
        self._ahead = num_workers * prefetch_factor
        self._generator = generator

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        counted = self.dataset if self._sampler is None else self._sampler
        count = len(cast("Sized", counted))
        if self.batch_size is None:
            return count
        whole = count // self.batch_size
        return whole if self.drop_last else math.ceil(count / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Go through the batches of a pass."""
        if self.num_workers == 0:
            yield from map(self._read, self._batches())
            return
        waiting: deque[Future[Any]] = deque()
        with ThreadPoolExecutor(self.num_workers, "DataLoader") as pool:
            try:
                for numbers in self._batches():
                    waiting.append(pool.submit(self._read, numbers))
                    if len(waiting) > self._ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _order(self) -> Iterable[int]:
        if self._sampler is not None:
            return self._sampler
        count = len(self.dataset)
        if not self._shuffle:
            return range(count)
        seed = int(tc.randint(0, 2**31, (1,), generator=self._generator).item())
        return [int(number) for number in np.random.default_rng(seed).permutation(count)]

    def _batches(self) -> Iterator[list[int]]:
        """The numbers of the items of each batch; of single ones where there is no size."""
        size = self.batch_size or 1
        numbers: list[int] = []
        for number in self._order():
            numbers.append(number)
            if len(numbers) == size:
                yield numbers
                numbers = []
        if numbers and not self.drop_last:
            yield numbers

    def _read(self, numbers: list[int]) -> Any:
        items = [self.dataset[number] for number in numbers]
        return items[0] if self.batch_size is None else self._collate(items)
