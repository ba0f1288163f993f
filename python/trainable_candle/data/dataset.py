"""The images of a run with their captions, and the batches that are made of them."""

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
    """What a cache entry encodes: a crop of an image, perhaps mirrored or with changed colours."""

    item: int
    """The index of the image in `Dataset.items`."""
    left: int
    """The column of the scaled image where the crop starts, px."""
    top: int
    """The row of the scaled image where the crop starts, px."""
    flipped: bool
    """Whether the crop is mirrored left to right after it is taken."""
    colors: Colors | None = None
    """The changes of the colours; None if there are none."""


@dataclass(frozen=True)
class Batch:
    """The input of one call of the loss; all images have the same size."""

    index: int
    """The number of the batch in the run, from 0; in validation, its index in the list."""
    samples: tuple[int, ...]
    """The sample number of each image. A sample is one use of an image. In training, the samples of
    all batches of the run are numbered from 0, so the numbers do not depend on the batch size. All
    random choices for a sample follow from its number, the image's file and the seed."""
    views: tuple[View, ...]
    captions: tuple[str, ...]
    bucket: Bucket
    """The size of all images, px."""
    frames: tuple[Frame, ...]
    """For each image, the part of it that the view shows."""
    loss_weights: npt.NDArray[np.float32]
    """The factor by which each image's loss is multiplied; shape (B,) for B images."""

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
        # The views of a crop: the crop itself and, with `flip`, its mirror image.
        self._sides = lru_cache(maxsize=None)(self._make_sides)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.items)

    def summary(self) -> str:
        """Return the lines to print before training: folders, buckets, images that are left out."""
        return self._summary

    def listing(self) -> dict[str, str]:
        """Return, for each image, a hash of its content, caption, mask file's path and settings.

        The keys are the images' paths, relative to the deepest folder that contains all images.
        """
        folder = Path(os.path.commonpath([item.image.path.parent for item in self.items]))
        return {
            item.image.path.relative_to(folder).as_posix(): fingerprint(
                {
                    "digest": item.image.digest,
                    "caption": item.image.caption,
                    "mask": item.image.mask and os.path.relpath(item.image.mask, folder),
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
        """Return the items with these indices as a data set; its summary is that of all items."""
        items = [self.items[number] for number in numbers]
        return Dataset(items, self.options, self._captions, self.seed, self._summary)

    def fixed(self) -> Dataset:
        """Return a data set of the same images whose views are not random.

        Each image is cropped at the centre, is not mirrored and has unchanged colours.
        """
        options = replace(self.options, crop="center", flip=False, color=ColorOptions())
        return Dataset(self.items, options, self._captions, self.seed, self._summary)

    def batches(self, batch_size: int) -> DatasetBatches:
        """Return training batches: images in random order, each with a random view and caption.

        Raises:
            ConfigError: the batch size is less than 1.
        """
        return DatasetBatches(self, batch_size, self.seed)

    def fixed_batches(self, batch_size: int) -> list[Batch]:
        """Return batches for validation, with each image once and nothing random.

        The images of a bucket keep the order of `items`. Each is cropped at the centre, is not
        mirrored and has unchanged colours. No caption is dropped, and no tag is dropped or moved.
        The last batch of a bucket may be smaller than `batch_size`.

        Raises:
            ConfigError: `batch_size` is below 1.
        """
        if batch_size < 1:
            raise ConfigError(
                f"batches: batch_size is {batch_size}, expected a whole number of at least 1"
            )
        by_bucket: dict[Bucket, list[int]] = {}
        for number, item in enumerate(self.items):
            by_bucket.setdefault(item.fit.bucket, []).append(number)
        groups = [
            members[start : start + batch_size]
            for _, members in sorted(by_bucket.items())
            for start in range(0, len(members), batch_size)
        ]
        # The number of the first sample of each group; the last element is the number of samples.
        firsts = accumulate((len(group) for group in groups), initial=0)
        return [
            self._batch(
                index,
                range(first, first + len(group)),
                [View(number, *self.items[number].fit.corner(), flipped=False) for number in group],
                [self._plain_caption(number) for number in group],
            )
            for index, (first, group) in enumerate(zip(firsts, groups, strict=False))
        ]

    def views(self) -> list[View]:
        """Return every view that can be in a batch, once each, sorted by bucket."""
        views = dict.fromkeys(
            view
            for number in range(len(self.items))
            for crop in range(self._crop_count)
            for color in range(self._color_count)
            for view in self._sides(number, crop, color)
        )
        return sorted(views, key=lambda view: self.items[view.item].fit.bucket)

    def possible_captions(self) -> list[str]:
        """Return every caption that can be in a batch, once each.

        Raises:
            ConfigError: tags are shuffled or dropped anew for each sample (`caption_variants` is
                0).
        """
        if self._maker.endless:
            raise ConfigError(
                "dataset: with caption_variants 0, tags are shuffled or dropped anew for each "
                "sample, so text features cannot be cached; set caption_variants to 1 or more"
            )
        captions = dict.fromkeys(
            caption
            for item in self.items
            for caption in self._maker.possible(item.image.caption, item.trigger, item.seed)
        )
        return list(captions)

    def pixels(self, view: View) -> npt.NDArray[np.uint8]:
        """Return the RGB values of a view; shape (height, width, 3), the size of its bucket.

        Raises:
            DatasetError: the file is missing, cannot be decoded, or has changed since the data set
                was loaded.
        """
        item = self.items[view.item]
        image = read_rgb(item.image.path, item.image.digest)
        pixels = self._cropped(view, image)
        if view.colors is None:
            return pixels
        opacity = None
        if item.image.transparent:
            opacity = self._cropped(view, read_alpha(item.image.path))
        return view.colors.apply(pixels, opacity)

    def masks(self, batch: Batch, factor: int = 8) -> npt.NDArray[np.float32] | None:
        """Return the masks of a batch: weights of the loss, from 0 to 1.

        An image without a mask has the weight 1 everywhere.

        Args:
            batch: the batch.
            factor: one element of the latents stands for `factor` x `factor` pixels.

        Returns:
            Shape (B, height / factor, width / factor) for B images, or None if masks are off for
            all images of the data set.

        Raises:
            DatasetError: the file of a mask is missing or cannot be decoded.
        """
        if all(item.mask == "off" for item in self.items):
            return None
        # Colours do not change a mask: without them, all colour variants share one cached mask.
        levels = np.stack([self._mask(replace(view, colors=None), factor) for view in batch.views])
        masks: npt.NDArray[np.float32] = levels.astype(np.float32) / np.float32(255)
        return masks

    def draw(self, index: int, numbers: Sequence[int]) -> Batch:
        """Return batch `index`: a random view and caption of each of the items.

        `numbers` has the indices of the items. All batches of a run have the same number of items.
        """
        samples = range(index * len(numbers), (index + 1) * len(numbers))
        views, captions = [], []
        for sample, number in zip(samples, numbers, strict=True):
            views.append(self._drawn_view(number, sample))
            item = self.items[number]
            captions.append(self._maker.use(item.image.caption, item.trigger, item.seed, sample))
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
        """Draw a view of item `number`: its crop, its side (mirrored or not) and its colours."""
        if self._crop_count == self._color_count == 1 and not self.options.flip:
            return self._sides(number, 0, 0)[0]
        rng = generator(self.seed, "view", sample)
        counts = (self._crop_count, 2, self._color_count)
        # The side is drawn even without `flip`, so that `flip` does not change the colours.
        crop, side, color = (int(rng.integers(count)) for count in counts)
        sides = self._sides(number, crop, color)
        return sides[side % len(sides)]

    def _plain_caption(self, number: int) -> str:
        item = self.items[number]
        return self._maker.plain(item.image.caption, item.trigger)

    @property
    def _crop_count(self) -> int:
        return self.options.random_crops if self.options.crop == "random" else 1

    @property
    def _color_count(self) -> int:
        return self.options.color.variants if self.options.color.varies else 1

    def _make_sides(self, number: int, crop: int, color: int) -> list[View]:
        """Return the view of item `number` with crop `crop` and colour variant `color`.

        With `flip`, the mirrored view follows.
        """
        item = self.items[number]
        fit = item.fit  # how the image is scaled and cropped to its bucket
        # `corner` takes where the crop is in each direction, from 0 to 1; by default the centre.
        if self.options.crop == "random":
            rng = generator(self.seed, "crop", pair(item.seed, crop))
            left, top = fit.corner(rng.random(), rng.random())
        else:
            left, top = fit.corner()
        colors = drawn_colors(self.options.color, self.seed, item.seed, color)
        view = View(number, left, top, flipped=False, colors=colors)
        return [view, replace(view, flipped=True)] if self.options.flip else [view]

    def _cropped(self, view: View, image: Image.Image) -> npt.NDArray[np.uint8]:
        fit = self.items[view.item].fit
        crop = fit.cut(image, view.left, view.top, flipped=view.flipped)
        return np.asarray(crop, dtype=np.uint8)

    def _read_mask(self, view: View, factor: int) -> npt.NDArray[np.uint8]:
        """Return the mask of a view, 0 to 255, with one value per element of the latents."""
        item = self.items[view.item]
        bucket = item.fit.bucket
        width, height = bucket.width // factor, bucket.height // factor
        if item.mask == "alpha":
            mask = read_alpha(item.image.path)
        elif item.image.mask is not None:  # a mask's file; only set if `item.mask` is "file"
            mask = read_grey(item.image.mask)
        else:
            return np.full((height, width), 255, np.uint8)
        crop = item.fit.cut(mask, view.left, view.top, flipped=view.flipped)
        return np.asarray(crop.resize((width, height), Image.Resampling.BOX), np.uint8)


class DatasetBatches:
    """The training batches of a data set, each computed from its number (a `BatchSource`)."""

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
