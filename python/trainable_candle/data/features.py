"""Latents and text features: encoded once, cached in memory or on disk, read in batches."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

import trainable_candle as tc
from trainable_candle.data.cache import fingerprint
from trainable_candle.data.filling import Filled, Progress, groups_of
from trainable_candle.data.kept import Entries
from trainable_candle.data.pixels import in_parallel
from trainable_candle.distributed.dealing import needed
from trainable_candle.distributed.group import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.data.buckets import Bucket
    from trainable_candle.data.dataset import Batch, Dataset, View
    from trainable_candle.data.filling import Report
    from trainable_candle.data.options import CacheOptions
    from trainable_candle.distributed.group import Group

    EncodePixels = Callable[[npt.NDArray[np.uint8]], Mapping[str, Tensor]]
    EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]

_Task = TypeVar("_Task")


class LatentCache:
    """The encoder's results for the views of a data set.

    Args:
        dataset: the images.
        encode: takes pixels, uint8 of shape (n, h, w, 3); returns tensors of n rows by name.
        options: where to keep results.
        identity: everything that results depend on besides pixels: the encoder's weights, its
            settings, the dtype. Different identities have separate entries.
        folder: the folder of entries (`cache_folder`); needed if `options.kind` is `disk`.
        device: the device of batches.
        encode_area: the most pixels that `encode` gets at once; a larger image is encoded alone.
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
        encode_area: int = 0,
    ) -> None:
        self._dataset = dataset
        self._encode = tc.no_grad()(encode)
        self._encode_area = encode_area
        self._kept = options.kind != "off"
        self._entries = Entries(options, "latents", identity, folder, device)
        self._keys: dict[View, str] = {}

    def fill(
        self, *, progress: bool = False, report: Report | None = None, group: Group = ALONE
    ) -> Filled:
        """Encode the missing entries, in batches of images of equal size.

        While the encoder works, several threads decode the next images and another thread writes
        entries. Except for the entries that stay in memory, the memory in use does not grow with
        the number of images. Nothing is encoded if the cache is off.

        Args:
            progress: whether to draw a bar on a terminal.
            report: gets a line from time to time if there is no bar.
            group: the processes that fill the cache together; each of them must call `fill`.

        Raises:
            DatasetError: an image has changed, or can no longer be decoded.
            OSError: an entry cannot be written; entries written earlier are kept.
            DistributedError: another process has failed.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        dataset = self._dataset
        keys = {self._key(view): view for view in dataset.views()}
        missing = self._entries.missing(list(keys))
        share, lacking = _dealt(group, missing, keys)

        def bucket(view: View) -> Bucket:
            return dataset.items[view.item].fit.bucket

        def at_once(bucket: Bucket) -> int:
            return max(1, self._encode_area // (bucket.width * bucket.height))

        def entry(view: View) -> tuple[str, dict[str, str]]:
            picture = dataset.items[view.item].picture
            return self._key(view), {"source": str(picture.path), "digest": picture.digest}

        batches = groups_of(share, bucket, at_once)
        with (
            closing(in_parallel(dataset.pixels, (v for b in batches for v in b))) as pixels,
            Progress("latents", len(share), progress, report) as done,
        ):
            stacked = (np.stack(list(islice(pixels, len(batch)))) for batch in batches)
            self._entries.fill(batches, stacked, self._encode, entry, done)
        self._entries.pass_on(group, lacking)
        removed = 0
        if group.rank == 0:
            digests = {str(item.picture.path): item.picture.digest for item in dataset.items}
            removed = self._entries.remove_superseded(set(keys), digests)
        return Filled(len(keys) - len(lacking), len(lacking), removed)

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of a batch, (B, ...) by name.

        Raises:
            DatasetError: an entry is missing.
        """
        if not self._kept:
            return self._entries.placed(self._encode(self._pixels(batch.views)))
        return _joined([self._entries.get(self._key(view)) for view in batch.views])

    def _pixels(self, views: Sequence[View]) -> npt.NDArray[np.uint8]:
        return np.stack([self._dataset.pixels(view) for view in views])

    def _key(self, view: View) -> str:
        key = self._keys.get(view)
        if key is None:
            key = self._keys[view] = self._fingerprint(view)
        return key

    def _fingerprint(self, view: View) -> str:
        item = self._dataset.items[view.item]
        colors = {} if view.colors is None else {"colors": asdict(view.colors)}
        return fingerprint(
            {
                "digest": item.picture.digest,
                "scaled": item.fit.scaled,
                "bucket": str(item.fit.bucket),
                "left": view.left,
                "top": view.top,
                "flipped": view.flipped,
                **colors,
            }
        )


class TextCache:
    """The text encoders' results for captions.

    Features of captions may have different lengths along dimension 1. In a batch, shorter features
    are extended by the features of the empty caption, repeated as often as needed.

    Args:
        encode: takes n captions; returns tensors of n rows by name.
        options: where to keep results.
        identity: everything that results depend on besides captions: the encoders' weights, clip
            skip, the number of tokens, the dtype. Different identities have separate entries.
        folder: the folder of entries (`cache_folder`); needed if `options.kind` is `disk`.
        device: the device of batches.
        encode_parts: the greatest sum of the captions' sizes (see `parts`) that `encode` gets at
            once; a larger caption is encoded alone.
        parts: returns the size of a caption, such as the number of chunks of tokens that the
            encoders read one by one. Only captions of equal size are encoded together.
    """

    def __init__(
        self,
        encode: EncodeTexts,
        options: CacheOptions,
        identity: Mapping[str, str],
        *,
        folder: Path | None = None,
        device: str = "cpu",
        encode_parts: int = 1,
        parts: Callable[[str], int] = lambda _: 1,
    ) -> None:
        self._encode = tc.no_grad()(encode)
        self._encode_parts = encode_parts
        self._parts = parts
        self._kept = options.kind != "off"
        self._entries = Entries(options, "text", identity, folder, device)

    def fill(
        self,
        captions: Sequence[str],
        *,
        progress: bool = False,
        report: Report | None = None,
        group: Group = ALONE,
    ) -> Filled:
        """Encode those captions that have no entry yet, and the empty caption if it has none.

        Another thread writes entries meanwhile. Nothing is encoded if the cache is off.

        Args:
            captions: any number, repetitions allowed.
            progress: whether to draw a bar on a terminal.
            report: gets a line from time to time if there is no bar.
            group: the processes that fill the cache together; each of them must call `fill`.

        Raises:
            OSError: an entry cannot be written; entries written earlier are kept.
            DistributedError: another process has failed.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        keys = {_text_key(caption): caption for caption in ("", *captions)}
        missing = self._entries.missing(list(keys))
        share, lacking = _dealt(group, missing, keys)

        def entry(caption: str) -> tuple[str, dict[str, str]]:
            return _text_key(caption), {"caption": caption}

        batches = groups_of(share, self._parts, self._at_once)
        with Progress("captions", len(share), progress, report) as done:
            self._entries.fill(batches, batches, self._encode, entry, done)
        self._entries.pass_on(group, lacking)
        return Filled(len(keys) - len(lacking), len(lacking), 0)

    def _at_once(self, parts: int) -> int:
        return max(1, self._encode_parts // max(1, parts))

    def batch(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of some captions, (B, ...) by name.

        Raises:
            DatasetError: an entry is missing.
        """
        if self._kept:
            rows = [self._entries.get(_text_key(caption)) for caption in captions]
        else:
            rows = [self._entries.placed(self._encode([caption])) for caption in captions]
        if any(len({row[name].shape for row in rows}) > 1 for name in rows[0]):
            blank = self.batch([""])
            rows = [_continued(row, rows, blank) for row in rows]
        return _joined(rows)


def _dealt(
    group: Group, missing: Sequence[str], tasks: Mapping[str, _Task]
) -> tuple[list[_Task], list[str]]:
    """Return the tasks that this process encodes, and all keys that some process lacks."""
    lacking = needed(group, missing, tasks)
    missing_here = set(missing)
    mine = lacking[group.rank :: group.size]
    return [tasks[key] for key in mine if key in missing_here], lacking


def _joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if len(rows) == 1:
        return dict(rows[0])
    return {name: tc.cat([row[name] for row in rows], 0) for name in rows[0]}


def _continued(
    row: Mapping[str, Tensor], rows: Sequence[Mapping[str, Tensor]], blank: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the features `row`, extended by `blank` along dimension 1 to the longest of `rows`."""
    whole = {}
    for name, tensor in row.items():
        if tensor.ndim < 2:
            whole[name] = tensor
            continue
        length = max(other[name].shape[1] for other in rows)
        parts, missing = [tensor], length - tensor.shape[1]
        while missing:
            parts.append(blank[name].narrow(1, 0, min(missing, blank[name].shape[1])))
            missing -= parts[-1].shape[1]
        whole[name] = tc.cat(parts, 1) if len(parts) > 1 else tensor
    return whole


def _text_key(caption: str) -> str:
    return fingerprint({"caption": caption})
