"""Latents and text features: encoded once, cached in memory or on disk, read in batches."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

import trainable_candle as tc
from trainable_candle.data.cache import fingerprint
from trainable_candle.data.filling import Filled, Progress, groups_of
from trainable_candle.data.kept import Entries
from trainable_candle.data.pixels import in_parallel
from trainable_candle.distributed.dealing import missing_anywhere
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
    """The encoder's results for the views of a data set; encodes each batch if the cache is off.

    A view is a crop of an image, perhaps mirrored or with changed colours.

    Args:
        dataset: the images.
        encode: takes pixels, uint8 of shape (n, h, w, 3); returns tensors of n rows by name.
        options: where to keep results.
        identity: everything that results depend on besides pixels: the encoder's weights, its
            settings, the dtype. Different identities have separate entries.
        folder: the result of `cache_folder`; needed if `options.kind` is `disk`.
        device: the device of batches.
        encode_area: the most pixels that `encode` gets at once; a larger image is encoded alone. By
            default, images are encoded one by one.
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
        self._is_on = options.kind != "off"
        self._entries = Entries(options, "latents", identity, folder, device)
        self._keys: dict[View, str] = {}

    def fill(
        self, *, progress: bool = False, report: Report | None = None, group: Group = ALONE
    ) -> Filled:
        """Encode the missing entries, in batches of images of equal size.

        At the end, remove the entries of earlier contents of the images, and damaged entries. Do
        nothing if the cache is off.

        While the encoder works, several threads decode the next images and another thread writes
        entries. Except for the entries that stay in memory, the memory in use does not grow with
        the number of images.

        Args:
            progress: whether to draw a bar on a terminal.
            report: without a bar, gets a line from time to time.
            group: the processes that fill the cache together; each of them must call `fill`.

        Raises:
            DatasetError: an image has changed or can no longer be decoded, or `encode` returns the
                wrong number of rows.
            OSError: an entry cannot be written; entries written earlier are kept.
            DistributedError: another process has failed.
        """
        if not self._is_on:
            return Filled(found=0, made=0, removed=0)
        dataset = self._dataset
        views = {self._key(view): view for view in dataset.views()}
        missing = self._entries.missing(list(views))
        mine, missing_anywhere_keys = _dealt(group, missing, views)

        def bucket_of(view: View) -> Bucket:
            return dataset.items[view.item].fit.bucket

        def images_at_once(bucket: Bucket) -> int:
            return max(1, self._encode_area // (bucket.width * bucket.height))

        def key_and_facts(view: View) -> tuple[str, dict[str, str]]:
            """Return the key of an entry, and the facts that its file holds beside the tensors."""
            image = dataset.items[view.item].image
            return self._key(view), {"source": str(image.path), "digest": image.digest}

        batches = groups_of(mine, bucket_of, images_at_once)
        with (
            closing(in_parallel(dataset.pixels, chain.from_iterable(batches))) as pixels,
            Progress("latents", len(mine), progress, report) as done,
        ):
            # Each batch takes its images from `pixels`, the stream of decoded images.
            stacked = (np.stack(list(islice(pixels, len(batch)))) for batch in batches)
            self._entries.fill(batches, stacked, self._encode, key_and_facts, done)
        # Send the entries to those processes that lack them.
        self._entries.pass_on(group, missing_anywhere_keys)
        removed = 0
        if group.rank == 0:
            digests = {str(item.image.path): item.image.digest for item in dataset.items}
            removed = self._entries.remove_superseded(set(views), digests)
        return Filled(
            found=len(views) - len(missing_anywhere_keys),
            made=len(missing_anywhere_keys),
            removed=removed,
        )

    def batch(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of a batch of B images, by name; their shapes begin with B.

        Raises:
            DatasetError: an entry is missing or damaged, or, with the cache off, an image has
                changed or can no longer be decoded.
        """
        if not self._is_on:
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
                "digest": item.image.digest,
                "scaled": item.fit.scaled,
                "bucket": str(item.fit.bucket),
                "left": view.left,
                "top": view.top,
                "flipped": view.flipped,
                **colors,
            }
        )


class TextCache:
    """The text encoders' results for captions; encodes each batch if the cache is off.

    Features of captions may have different lengths along dimension 1. In a batch, shorter features
    are extended by the features of the empty caption, repeated as often as needed.

    Args:
        encode: takes n captions; returns tensors of n rows by name.
        options: where to keep results.
        identity: everything that results depend on besides captions: the encoders' weights, clip
            skip, the number of tokens, the dtype. Different identities have separate entries.
        folder: the result of `cache_folder`; needed if `options.kind` is `disk`.
        device: the device of batches.
        most_size: the greatest sum of the captions' sizes (see `size_of`) that `encode` gets at
            once; a larger caption is encoded alone.
        size_of: returns the size of a caption, such as the number of chunks of tokens that the
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
        most_size: int = 1,
        size_of: Callable[[str], int] = lambda _: 1,
    ) -> None:
        self._encode = tc.no_grad()(encode)
        self._most_size = most_size
        self._size_of = size_of
        self._is_on = options.kind != "off"
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

        While the encoders work, another thread writes entries. Nothing is encoded if the cache is
        off.

        Args:
            captions: any number, repetitions allowed.
            progress: whether to draw a bar on a terminal.
            report: without a bar, gets a line from time to time.
            group: the processes that fill the cache together; each of them must call `fill`.

        Raises:
            DatasetError: `encode` returns the wrong number of rows.
            OSError: an entry cannot be written; entries written earlier are kept.
            DistributedError: another process has failed.
        """
        if not self._is_on:
            return Filled(found=0, made=0, removed=0)
        texts = {_text_key(caption): caption for caption in ("", *captions)}
        missing = self._entries.missing(list(texts))
        mine, missing_anywhere_keys = _dealt(group, missing, texts)

        def key_and_facts(caption: str) -> tuple[str, dict[str, str]]:
            """Return the key of an entry, and the facts that its file holds beside the tensors."""
            return _text_key(caption), {"caption": caption}

        batches = groups_of(mine, self._size_of, self._captions_at_once)
        with Progress("captions", len(mine), progress, report) as done:
            # The encoders read the captions themselves, so the batches are also the inputs.
            self._entries.fill(batches, batches, self._encode, key_and_facts, done)
        # Send the entries to those processes that lack them.
        self._entries.pass_on(group, missing_anywhere_keys)
        return Filled(
            found=len(texts) - len(missing_anywhere_keys),
            made=len(missing_anywhere_keys),
            removed=0,
        )

    def _captions_at_once(self, size: int) -> int:
        return max(1, self._most_size // max(1, size))

    def batch(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of B captions, by name; their shapes begin with B.

        Raises:
            DatasetError: an entry is missing or damaged.
        """
        if self._is_on:
            rows = [self._entries.get(_text_key(caption)) for caption in captions]
        else:
            # Only captions of equal size can be encoded together, so each is encoded alone.
            rows = [self._entries.placed(self._encode([caption])) for caption in captions]
        if any(len({row[name].shape for row in rows}) > 1 for name in rows[0]):
            blank = self.batch([""])
            rows = [_continued(row, rows, blank) for row in rows]
        return _joined(rows)


def _dealt(
    group: Group, missing: Sequence[str], tasks: Mapping[str, _Task]
) -> tuple[list[_Task], list[str]]:
    """Find the entries that some process lacks, and deal them out to all processes.

    Args:
        group: the processes.
        missing: the keys of the entries that this process lacks.
        tasks: what to encode (views or captions) for every entry, by key; in the same order in all
            processes.

    Returns:
        The tasks that this process encodes, and the keys of all entries that some process lacks.
    """
    missing_anywhere_keys = missing_anywhere(group, missing, tasks)
    missing_here = set(missing)
    mine = missing_anywhere_keys[group.rank :: group.size]
    # An entry that this process has, but another lacks, is not encoded again: `pass_on` sends it.
    return [tasks[key] for key in mine if key in missing_here], missing_anywhere_keys


def _joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of one or more rows along dimension 0, name by name."""
    if len(rows) == 1:
        return dict(rows[0])
    return {name: tc.cat([row[name] for row in rows], 0) for name in rows[0]}


def _continued(
    row: Mapping[str, Tensor], rows: Sequence[Mapping[str, Tensor]], blank: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the features `row`, extended along dimension 1 to the longest features of `rows`.

    The features `blank` are appended as often as needed; the last repetition may be cut off.
    """
    extended = {}
    for name, tensor in row.items():
        if tensor.ndim < 2:
            extended[name] = tensor
            continue
        length = max(other[name].shape[1] for other in rows)
        pieces, missing_length = [tensor], length - tensor.shape[1]
        while missing_length:
            pieces.append(blank[name].narrow(1, 0, min(missing_length, blank[name].shape[1])))
            missing_length -= pieces[-1].shape[1]
        extended[name] = tc.cat(pieces, 1) if len(pieces) > 1 else tensor
    return extended


def _text_key(caption: str) -> str:
    return fingerprint({"caption": caption})
