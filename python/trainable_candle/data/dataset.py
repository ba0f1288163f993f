"""All images of a run with their captions, drawn as batches."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from trainable_candle.data.batches import ShuffledBatches
from trainable_candle.data.cache import fingerprint
from trainable_candle.data.captions import CaptionMaker
from trainable_candle.data.colors import drawn_colors
from trainable_candle.data.metadata import described
from trainable_candle.data.options import ColorOptions
from trainable_candle.data.pixels import read_alpha, read_grey, read_rgb
from trainable_candle.draws import generator, pair
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from trainable_candle.data.buckets import Bucket, Frame
    from trainable_candle.data.colors import Colors
    from trainable_candle.data.item import Item
    from trainable_candle.data.options import CaptionOptions, DatasetOptions

_MASKS_KEPT: Final = 4096
"""The greatest number of masks that stay in memory."""


@dataclass(frozen=True)
class View:
    """What one cache entry encodes: a crop of an image, perhaps mirrored and with other colours."""

    item: int
    """The index of the image in `Dataset.items`."""
    left: int
    """The column of the scaled image where the crop starts, px."""
    top: int
    """The row of the scaled image where the crop starts, px."""
    flipped: bool
    colors: Colors | None = None
    """The changes of the colours; None if there are none."""


@dataclass(frozen=True)
class Batch:
    """The input of one call of the loss; all images have the same size."""

    index: int
    """The number of the batch in the run."""
    samples: tuple[int, ...]
    """The sample number of each image. A sample is one use of an image. In training, the samples of
    all batches of the run are numbered from 0, so the numbers do not depend on the batch size. All
    random choices for a sample follow from its number, the image's file and the seed."""
    views: tuple[View, ...]
    captions: tuple[str, ...]
    bucket: Bucket
    frames: tuple[Frame, ...]
    """For each image, the part of it that the view shows."""
    loss_weights: npt.NDArray[np.float32]
    """The factor by which each image's loss is multiplied; shape (B,)."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.views)


class Dataset:
    """Images with captions; made by `load_dataset`."""

    def __init__(
        self,
        items: Sequence[Item],
        options: DatasetOptions,
        captions: CaptionOptions,
        seed: int,
        summary: str,
    ) -> None:
        self.items = tuple(items)
        self.options = options
        self._captions = captions
        self._maker = CaptionMaker(captions, seed)
        self.seed = seed
        self._summary = summary
        self._mask = lru_cache(maxsize=_MASKS_KEPT)(self._read_mask)
        self._variants = lru_cache(maxsize=None)(self._make_variants)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.items)

    def summary(self) -> str:
        """Return the lines to print before training: folders, buckets, images that are left out."""
        return self._summary

    def listing(self) -> dict[str, str]:
        """Return, for each image, a hash of its content, caption, mask's path and settings.

        The keys are the images' paths, relative to the deepest folder that contains all images.
        """
        folder = Path(os.path.commonpath([item.picture.path.parent for item in self.items]))
        return {
            item.picture.path.relative_to(folder).as_posix(): fingerprint(
                {
                    "digest": item.picture.digest,
                    "caption": item.picture.caption,
                    "mask": item.picture.mask and os.path.relpath(item.picture.mask, folder),
                    "settings": [item.trigger, item.loss_weight, item.repeats, item.mask],
                }
            )
            for item in self.items
        }

    def metadata(self) -> dict[str, str]:
        """Return the metadata about the images for adapter files.

        The names are those of kohya's scripts and of ModelSpec, a standard for such metadata.
        """
        return described(self.items, self._captions.separator)

    def part(self, numbers: Sequence[int]) -> Dataset:
        """Return the items with these indices as a separate data set."""
        items = [self.items[number] for number in numbers]
        return Dataset(items, self.options, self._captions, self.seed, self._summary)

    def fixed(self) -> Dataset:
        """Return the same images, never mirrored, with centre crops and unchanged colours."""
        options = replace(self.options, crop="center", flip=False, color=ColorOptions())
        return Dataset(self.items, options, self._captions, self.seed, self._summary)

    def batches(self, batch_size: int) -> DatasetBatches:
        """Return batches in random order.

        Raises:
            ConfigError: the batch size is less than 1.
        """
        return DatasetBatches(self, batch_size, self.seed)

    def fixed_batches(self, batch_size: int) -> list[Batch]:
        """Return batches for validation, with each image once and nothing random.

        The images of a bucket keep the order of `items`. Each is cropped at the centre, is not
        mirrored and has unchanged colours. Captions are whole, with their tags in order. The last
        batch of a bucket may be smaller.
        """
        by_bucket: dict[Bucket, list[int]] = {}
        for number, item in enumerate(self.items):
            by_bucket.setdefault(item.fit.bucket, []).append(number)
        groups = [
            members[start : start + batch_size]
            for _, members in sorted(by_bucket.items())
            for start in range(0, len(members), batch_size)
        ]
        starts = accumulate((len(group) for group in groups), initial=0)
        return [
            self._batch(
                index,
                range(start, start + len(group)),
                [View(number, *self.items[number].fit.box(), flipped=False) for number in group],
                [self._plain_caption(number) for number in group],
            )
            for index, (start, group) in enumerate(zip(starts, groups, strict=False))
        ]

    def views(self) -> list[View]:
        """Return every view that can be in a batch, grouped by bucket."""
        found = {
            view: None
            for number in range(len(self.items))
            for crop in range(self._crops)
            for color in range(self._colors)
            for view in self._variants(number, crop, color)
        }
        return sorted(found, key=lambda view: self.items[view.item].fit.bucket)

    def possible_captions(self) -> list[str]:
        """Return every caption that can be in a batch.

        Raises:
            ConfigError: tags are shuffled or dropped anew for each sample (`variants` is 0).
        """
        if self._maker.endless:
            raise ConfigError(
                "dataset: with caption_variants 0, tags are shuffled or dropped anew for each "
                "sample, so text features cannot be cached; set caption_variants to 1 or more"
            )
        found = {
            caption: None
            for item in self.items
            for caption in self._maker.possible(item.picture.caption, item.trigger, item.seed)
        }
        return list(found)

    def pixels(self, view: View) -> npt.NDArray[np.uint8]:
        """Return the RGB values of a view: (height, width, 3) in the size of its bucket.

        Raises:
            DatasetError: the file is missing or has changed since the data set was loaded.
        """
        item = self.items[view.item]
        image = read_rgb(item.picture.path, item.picture.digest)
        pixels = self._cropped(view, image)
        if view.colors is None:
            return pixels
        opacity = None
        if item.picture.transparent:
            opacity = self._cropped(view, read_alpha(item.picture.path))
        return view.colors.apply(pixels, opacity)

    def masks(self, batch: Batch, factor: int = 8) -> npt.NDArray[np.float32] | None:
        """Return the weights of the loss, from 0 to 1; 1 everywhere for images without a mask.

        Args:
            batch: the batch.
            factor: pixels per element of the latents, in width and in height.

        Returns:
            Shape (B, height / factor, width / factor), or None if masks are off for all images.

        Raises:
            DatasetError: a mask cannot be decoded.
        """
        if all(item.mask == "off" for item in self.items):
            return None
        levels = np.stack([self._mask(replace(view, colors=None), factor) for view in batch.views])
        masks: npt.NDArray[np.float32] = levels.astype(np.float32) / np.float32(255)
        return masks

    def draw(self, index: int, numbers: Sequence[int]) -> Batch:
        """Return batch number `index`: a random view and caption of each of the items `numbers`."""
        samples = range(index * len(numbers), (index + 1) * len(numbers))
        views, captions = [], []
        for sample, number in zip(samples, numbers, strict=True):
            views.append(self._drawn_view(number, sample))
            item = self.items[number]
            captions.append(self._maker.use(item.picture.caption, item.trigger, item.seed, sample))
        return self._batch(index, samples, views, captions)

    def _batch(
        self, index: int, samples: range, views: Sequence[View], captions: Sequence[str]
    ) -> Batch:
        items = [self.items[view.item] for view in views]
        return Batch(
            index,
            tuple(samples),
            tuple(views),
            tuple(captions),
            items[0].fit.bucket,
            tuple(
                item.fit.frame(view.left, view.top, flipped=view.flipped)
                for item, view in zip(items, views, strict=True)
            ),
            np.array([item.loss_weight for item in items], np.float32),
        )

    def _drawn_view(self, number: int, sample: int) -> View:
        if self._crops == self._colors == 1 and not self.options.flip:
            return self._variants(number, 0, 0)[0]
        rng = generator(self.seed, "view", sample)
        crop, side, color = (int(rng.integers(count)) for count in (self._crops, 2, self._colors))
        variants = self._variants(number, crop, color)
        return variants[side % len(variants)]

    def _plain_caption(self, number: int) -> str:
        item = self.items[number]
        return self._maker.plain(item.picture.caption, item.trigger)

    @property
    def _crops(self) -> int:
        return self.options.random_crops if self.options.crop == "random" else 1

    @property
    def _colors(self) -> int:
        return self.options.color.variants if self.options.color.varies else 1

    def _make_variants(self, number: int, crop: int, color: int) -> list[View]:
        """Return the views with crop number `crop` and colours number `color`.

        They are one view that is not mirrored and, with `flip`, its mirrored image.
        """
        item = self.items[number]
        fit = item.fit
        if self.options.crop == "random":
            rng = generator(self.seed, "crop", pair(item.seed, crop))
            left, top = fit.box(rng.random(), rng.random())
        else:
            left, top = fit.box()
        sides = (False, True) if self.options.flip else (False,)
        colors = drawn_colors(self.options.color, self.seed, item.seed, color)
        return [View(number, left, top, flipped, colors) for flipped in sides]

    def _cropped(self, view: View, image: Image.Image) -> npt.NDArray[np.uint8]:
        fit = self.items[view.item].fit
        crop = fit.cut(image, view.left, view.top, flipped=view.flipped)
        return np.asarray(crop, dtype=np.uint8)

    def _read_mask(self, view: View, factor: int) -> npt.NDArray[np.uint8]:
        item = self.items[view.item]
        bucket = item.fit.bucket
        size = bucket.width // factor, bucket.height // factor
        if item.mask == "alpha":
            whole = read_alpha(item.picture.path)
        elif item.picture.mask is not None:
            whole = read_grey(item.picture.mask)
        else:
            return np.full((size[1], size[0]), 255, np.uint8)
        cut = item.fit.cut(whole, view.left, view.top, flipped=view.flipped)
        return np.asarray(cut.resize(size, Image.Resampling.BOX), np.uint8)


class DatasetBatches:
    """Batches of a data set by number, a `BatchSource` for the trainer."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int) -> None:
        buckets = sorted({item.fit.bucket for item in dataset.items})
        self._dataset = dataset
        self._order = ShuffledBatches(
            len(dataset),
            batch_size,
            seed,
            groups=[buckets.index(item.fit.bucket) for item in dataset.items],
            repeats=[item.repeats for item in dataset.items],
        )

    def batch(self, index: int) -> Batch:
        """Return batch number `index`, from 0; the same in every call."""
        return self._dataset.draw(index, self._order.batch(index).tolist())

    def first_batch(self, epoch: int) -> int:
        """Return the number of the first batch of an epoch; epochs are counted from 0."""
        return self._order.first_batch(epoch)
