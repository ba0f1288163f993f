"""Latents and text features: encoded once, kept in memory or on disk, given out by the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from tqdm import tqdm

import trainable_candle as tc
from trainable_candle.data.cache import FeatureStore, fingerprint
from trainable_candle.data.pixels import in_parallel
from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.data.dataset import Batch, Dataset, View
    from trainable_candle.data.options import CacheOptions

    EncodePixels = Callable[[npt.NDArray[np.uint8]], Mapping[str, Tensor]]
    EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]

_Task = TypeVar("_Task")

DEVICE_LIMIT: Final = 512 * 1024**2
"""Bytes of a cache's entries that are kept on the device; the rest is moved there by the batch."""
MEMORY_LIMIT: Final = 2 * 1024**3
"""Bytes of a cache's entries on disk that are also kept in memory, on the device or not."""


@dataclass(frozen=True)
class Filled:
    """What filling a cache took."""

    found: int
    """Entries that were there."""
    made: int
    removed: int
    """Entries of earlier versions of the same files."""

    def __str__(self) -> str:
        """In a line."""
        gone = f", {self.removed} outdated removed" if self.removed else ""
        return f"{self.found} found, {self.made} made{gone}"


class LatentCache:
    """What an encoder makes of the views of a data set.

    Args:
        dataset: whose pictures.
        encode: from pixels, uint8 of shape (n, h, w, 3), to tensors of n rows by name.
        options: whether and how to keep results.
        identity: everything that results depend on besides pixels: the encoder's weights, its
            settings, the dtype. Other values, other entries.
        folder: for files, see `cache_folder`; needed if `options.kind` is `disk`.
        device: where batches go.
        encode_batch: pictures that `encode` is given at once, at least 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        encode: EncodePixels,
        options: CacheOptions,
        identity: Mapping[str, str],
        *,
        folder: Path | None = None,
        device: str = "cpu",
        encode_batch: int = 1,
    ) -> None:
        self._dataset = dataset
        self._encode = tc.no_grad()(encode)
        self._encode_batch = encode_batch
        self._kept = options.kind != "off"
        self._entries = _Entries(options, "latents", identity, folder, device)

    def fill(self, *, progress: bool = False) -> Filled:
        """Encode what is not there yet; pictures are decoded ahead in parallel.

        Nothing is encoded if nothing is to be kept.

        Raises:
            DatasetError: a picture cannot be decoded any more.
            OSError: an entry cannot be written.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        dataset = self._dataset
        keys = {self._key(view): view for view in dataset.views()}
        missing = self._entries.missing(keys)
        groups = _groups(missing, self._encode_batch, lambda v: dataset.items[v.item].fit.bucket)
        with tqdm(total=len(missing), desc="latents", disable=not progress) as bar:
            for group, pixels in zip(groups, in_parallel(self._pixels, groups), strict=True):
                for view, row in zip(group, _rows(self._encode(pixels), len(group)), strict=True):
                    picture = dataset.items[view.item].picture
                    facts = {"source": str(picture.path), "digest": picture.digest}
                    self._entries.add(self._key(view), row, facts)
                bar.update(len(group))
        digests = {str(item.picture.path): item.picture.digest for item in dataset.items}
        removed = self._entries.remove_superseded(set(keys), digests)
        return Filled(len(keys) - len(missing), len(missing), removed)

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of a batch, (B, ...) by name.

        Raises:
            DatasetError: an entry has vanished, or was never made.
        """
        if not self._kept:
            return dict(self._encode(self._pixels(batch.views)))
        return _joined([self._entries.get(self._key(view)) for view in batch.views])

    def _pixels(self, views: Sequence[View]) -> npt.NDArray[np.uint8]:
        return np.stack([self._dataset.pixels(view) for view in views])

    def _key(self, view: View) -> str:
        item = self._dataset.items[view.item]
        return fingerprint(
            {
                "digest": item.picture.digest,
                "scaled": item.fit.scaled,
                "bucket": str(item.fit.bucket),
                "left": view.left,
                "top": view.top,
                "flipped": view.flipped,
            }
        )


class TextCache:
    """What text encoders make of captions.

    Captions of different lengths may have features of different lengths along dimension 1: in a
    batch, the shorter ones are continued with those of the empty caption, part by part.

    Args:
        encode: from n captions to tensors of n rows by name.
        options: whether and how to keep results.
        identity: everything that results depend on besides captions: the encoders' weights, clip
            skip, the number of tokens, the dtype. Other values, other entries.
        folder: for files, see `cache_folder`; needed if `options.kind` is `disk`.
        device: where batches go.
        encode_batch: captions that `encode` is given at once, at least 1.
        group: only captions with the same value are encoded together; here, the number of chunks.
    """

    def __init__(
        self,
        encode: EncodeTexts,
        options: CacheOptions,
        identity: Mapping[str, str],
        *,
        folder: Path | None = None,
        device: str = "cpu",
        encode_batch: int = 1,
        group: Callable[[str], Hashable] = lambda _: None,
    ) -> None:
        self._encode = tc.no_grad()(encode)
        self._encode_batch = encode_batch
        self._group = group
        self._kept = options.kind != "off"
        self._entries = _Entries(options, "text", identity, folder, device)

    def fill(self, captions: Sequence[str], *, progress: bool = False) -> Filled:
        """Encode those that are not there yet, and the empty one.

        Nothing is encoded if nothing is to be kept.

        Raises:
            OSError: an entry cannot be written.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        keys = {_text_key(caption): caption for caption in ("", *captions)}
        missing = self._entries.missing(keys)
        with tqdm(total=len(missing), desc="captions", disable=not progress) as bar:
            for group in _groups(missing, self._encode_batch, self._group):
                for caption, row in zip(group, _rows(self._encode(group), len(group)), strict=True):
                    self._entries.add(_text_key(caption), row, {"caption": caption})
                bar.update(len(group))
        return Filled(len(keys) - len(missing), len(missing), 0)

    def batch(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The tensors of some captions, (B, ...) by name.

        Raises:
            DatasetError: an entry has vanished, or was never made.
        """
        if self._kept:
            rows = [self._entries.get(_text_key(caption)) for caption in captions]
        else:
            rows = [dict(self._encode([caption])) for caption in captions]
        if any(len({row[name].shape for row in rows}) > 1 for name in rows[0]):
            blank = self._entries.get(_text_key("")) if self._kept else dict(self._encode([""]))
            rows = [_continued(row, rows, blank) for row in rows]
        return _joined(rows)


class _Entries:
    """Entries in memory, in files, or both."""

    def __init__(
        self,
        options: CacheOptions,
        kind: str,
        identity: Mapping[str, str],
        folder: Path | None,
        device: str,
    ) -> None:
        self._kind = kind
        self._device = device
        self._store: FeatureStore | None = None
        if options.kind == "disk":
            if folder is None:
                raise DatasetError(f"cache: {kind} on disk need a folder, and none is given")
            self._store = FeatureStore(folder, kind, identity)
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._bytes = 0

    def missing(self, tasks: Mapping[str, _Task]) -> list[_Task]:
        """The tasks, by key, that there are no entries of."""
        held = in_parallel(self._holds, list(tasks))
        return [task for task, there in zip(tasks.values(), held, strict=True) if not there]

    def _holds(self, key: str) -> bool:
        return key in self._memory or (self._store is not None and self._store.holds(key))

    def add(self, key: str, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> None:
        if self._store is not None:
            self._store.write(key, tensors, facts)
        self._remember(key, tensors)

    def get(self, key: str) -> dict[str, Tensor]:
        if key in self._memory:
            return {name: tensor.to(self._device) for name, tensor in self._memory[key].items()}
        tensors = self._store.read(key, self._device) if self._store is not None else None
        if tensors is None:
            where = f" in {self._store.folder}" if self._store is not None else ""
            raise DatasetError(
                f"cache: there are no {self._kind} {key}{where}; fill the cache before its "
                "batches are used, and leave it alone during training"
            )
        self._remember(key, tensors)
        return tensors

    def remove_superseded(self, needed: set[str], digests: Mapping[str, str]) -> int:
        return 0 if self._store is None else self._store.remove_superseded(needed, digests)

    def _remember(self, key: str, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        if self._store is None or self._bytes + size <= MEMORY_LIMIT:
            place = self._device if self._bytes + size <= DEVICE_LIMIT else "cpu"
            self._memory[key] = {name: tensor.to(place) for name, tensor in tensors.items()}
            self._bytes += size


def _groups(
    tasks: Sequence[_Task], size: int, kind: Callable[[_Task], Hashable]
) -> list[list[_Task]]:
    """Tasks of one kind together, `size` at most."""
    by_kind: dict[Hashable, list[_Task]] = {}
    for task in tasks:
        by_kind.setdefault(kind(task), []).append(task)
    return [
        members[start : start + size]
        for members in by_kind.values()
        for start in range(0, len(members), size)
    ]


def _rows(encoded: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Each row of some tensors, as tensors of one row."""
    for name, tensor in encoded.items():
        if tensor.ndim == 0 or tensor.shape[0] != count:
            raise DatasetError(
                f"cache: the encoder was given {count} items and returned `{name}` of shape "
                f"{tuple(tensor.shape)}, expected ({count}, ...)"
            )
    return [
        {name: t.detach().narrow(0, row, 1).contiguous() for name, t in encoded.items()}
        for row in range(count)
    ]


def _joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if len(rows) == 1:
        return dict(rows[0])
    return {name: tc.cat([row[name] for row in rows], 0) for name in rows[0]}


def _continued(
    row: Mapping[str, Tensor], rows: Sequence[Mapping[str, Tensor]], blank: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A row as long, along dimension 1, as the longest of `rows`."""
    whole = {}
    for name, tensor in row.items():
        length = max(other[name].shape[1] for other in rows) if tensor.ndim > 1 else 0
        parts = [tensor]
        while sum(part.shape[1] for part in parts) < length:
            parts.append(blank[name])
        whole[name] = tc.cat(parts, 1) if len(parts) > 1 else tensor
    return whole


def _text_key(caption: str) -> str:
    return fingerprint({"caption": caption})
