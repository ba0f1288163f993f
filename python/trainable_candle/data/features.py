"""Latents and text features: encoded once, kept in memory or on disk, given out by the batch."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

import trainable_candle as tc
from trainable_candle.data.cache import fingerprint
from trainable_candle.data.filling import Filled, Progress, groups_of
from trainable_candle.data.kept import Entries
from trainable_candle.data.pixels import in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.data.buckets import Bucket
    from trainable_candle.data.dataset import Batch, Dataset, View
    from trainable_candle.data.filling import Report
    from trainable_candle.data.options import CacheOptions

    EncodePixels = Callable[[npt.NDArray[np.uint8]], Mapping[str, Tensor]]
    EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]


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
        encode_area: pixels of the pictures that `encode` is given at once, at most; but always at
            least one picture.
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

    def fill(self, *, progress: bool = False, report: Report | None = None) -> Filled:
        """Encode what is not there yet, by batches of one size.

        Pictures are decoded ahead on threads and entries written by another, while the encoder
        works; of both, as many are in memory as of ten pictures as of ten thousand. Nothing is
        encoded if nothing is to be kept.

        Args:
            progress: whether to draw a bar on a terminal.
            report: gets a line now and then where there is no bar.

        Raises:
            DatasetError: a picture has changed, or cannot be decoded any more.
            OSError: an entry cannot be written; those before it are there.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        dataset = self._dataset
        keys = {self._key(view): view for view in dataset.views()}
        missing = self._entries.missing(keys)

        def bucket(view: View) -> Bucket:
            return dataset.items[view.item].fit.bucket

        def at_once(bucket: Bucket) -> int:
            return max(1, self._encode_area // (bucket.width * bucket.height))

        def entry(view: View) -> tuple[str, dict[str, str]]:
            picture = dataset.items[view.item].picture
            return self._key(view), {"source": str(picture.path), "digest": picture.digest}

        groups = groups_of(missing, bucket, at_once)
        with (
            closing(in_parallel(dataset.pixels, (v for g in groups for v in g))) as pixels,
            Progress("latents", len(missing), progress, report) as done,
        ):
            stacked = (np.stack(list(islice(pixels, len(group)))) for group in groups)
            self._entries.fill(groups, stacked, self._encode, entry, done)
        digests = {str(item.picture.path): item.picture.digest for item in dataset.items}
        removed = self._entries.remove_superseded(set(keys), digests)
        return Filled(len(keys) - len(missing), len(missing), removed)

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of a batch, (B, ...) by name.

        Raises:
            DatasetError: an entry has vanished, or was never made.
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
        encode_parts: parts of captions that `encode` is given at once, at most; but always at least
            one caption.
        parts: how many parts a caption has; only captions of as many are encoded together.
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
        self, captions: Sequence[str], *, progress: bool = False, report: Report | None = None
    ) -> Filled:
        """Encode those that are not there yet, and the empty one; entries are written meanwhile.

        Nothing is encoded if nothing is to be kept.

        Args:
            captions: any number, also the same several times.
            progress: whether to draw a bar on a terminal.
            report: gets a line now and then where there is no bar.

        Raises:
            OSError: an entry cannot be written; those before it are there.
        """
        if not self._kept:
            return Filled(0, 0, 0)
        keys = {_text_key(caption): caption for caption in ("", *captions)}
        missing = self._entries.missing(keys)
        groups = groups_of(missing, self._parts, self._at_once)

        def entry(caption: str) -> tuple[str, dict[str, str]]:
            return _text_key(caption), {"caption": caption}

        with Progress("captions", len(missing), progress, report) as done:
            self._entries.fill(groups, groups, self._encode, entry, done)
        return Filled(len(keys) - len(missing), len(missing), 0)

    def _at_once(self, parts: int) -> int:
        return max(1, self._encode_parts // max(1, parts))

    def batch(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The tensors of some captions, (B, ...) by name.

        Raises:
            DatasetError: an entry has vanished, or was never made.
        """
        if self._kept:
            rows = [self._entries.get(_text_key(caption)) for caption in captions]
        else:
            rows = [self._entries.placed(self._encode([caption])) for caption in captions]
        if any(len({row[name].shape for row in rows}) > 1 for name in rows[0]):
            blank = self.batch([""])
            rows = [_continued(row, rows, blank) for row in rows]
        return _joined(rows)


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
