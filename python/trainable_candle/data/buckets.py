"""Aspect-ratio buckets: the sizes of training images, and how an image is fitted to a bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from trainable_candle.data.options import DatasetOptions


@dataclass(frozen=True, order=True)
class Bucket:
    """The size of the images of a batch, px."""

    width: int
    height: int

    def __str__(self) -> str:
        """Format as width x height."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Frame:
    """The crop of an image that is trained on, px. SDXL is conditioned on these values."""

    original: tuple[int, int]
    """Width and height of the image before it is scaled."""
    left: int
    """First column of the crop in the scaled image, or in its mirror image for a mirrored crop."""
    top: int
    """Row where the crop starts, in the scaled image."""
    bucket: Bucket
    """The size of the crop."""

    @classmethod
    def whole(cls, width: int, height: int) -> Frame:
        """Return the frame of an image that is neither scaled nor cropped."""
        return cls((width, height), 0, 0, Bucket(width, height))


@dataclass(frozen=True)
class Fit:
    """How an image is scaled to cover a bucket and then cropped to it, px."""

    bucket: Bucket
    original: tuple[int, int]
    """Width and height of the image."""
    scaled: tuple[int, int]
    """Width and height after scaling; neither is less than the bucket's."""

    @property
    def margin(self) -> tuple[int, int]:
        """The columns and rows that are cropped away."""
        return self.scaled[0] - self.bucket.width, self.scaled[1] - self.bucket.height

    @property
    def lost(self) -> float:
        """The part of the image that is cropped away, 0 to below 1."""
        return 1 - self.bucket.width * self.bucket.height / (self.scaled[0] * self.scaled[1])

    def box(self, across: float = 0.5, down: float = 0.5) -> tuple[int, int]:
        """Return the left column and top row of a crop; `across` and `down` (0 to 1) place it."""
        columns, rows = self.margin
        return round(columns * across), round(rows * down)

    def frame(self, left: int, top: int, *, flipped: bool = False) -> Frame:
        """Return the frame of a crop, in the mirrored image if `flipped`."""
        return Frame(self.original, self.margin[0] - left if flipped else left, top, self.bucket)

    def cut(self, image: Image.Image, left: int, top: int, *, flipped: bool = False) -> Image.Image:
        """Scale and crop an image, or its mask of any size, to the bucket; mirror if `flipped`."""
        if image.size != self.scaled:
            image = image.resize(self.scaled, Image.Resampling.LANCZOS)
        image = image.crop((left, top, left + self.bucket.width, top + self.bucket.height))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else image


class Buckets:
    """The buckets that `DatasetOptions` allow, and the choice of a bucket for an image.

    The sides of a full-size bucket are multiples of the step; its area is as large as possible but
    at most that of a square of `resolution`. An image goes to the bucket with the nearest aspect
    ratio. If images may be enlarged, all full-size buckets are candidates. Otherwise the candidates
    are the full-size buckets that the image covers, and a bucket whose sides are the largest
    multiples of the step within the image's sides. This bucket is no candidate if its area is too
    large or a side is too short.
    """

    def __init__(self, options: DatasetOptions) -> None:
        self._options = options
        self._area = options.resolution**2
        square = Bucket(options.resolution, options.resolution)
        self.full: tuple[Bucket, ...] = (square,)
        if options.bucketing:
            self.full = tuple(sorted({square, *self._sizes()}))

    def fit(self, width: int, height: int) -> Fit | None:
        """Return how an image is fitted to a bucket; None if it is too small for every bucket."""

        def distance(bucket: Bucket) -> tuple[float, int]:
            apart = math.log(bucket.width / bucket.height) - math.log(width / height)
            return round(abs(apart), 9), -bucket.width * bucket.height

        if self._options.upscale:
            candidates = list(self.full)
        else:
            candidates = [size for size in self.full if _covers(width, height, size)]
            if self._options.bucketing and (own := self._largest_within(width, height)):
                candidates.append(own)
        if not candidates:
            return None
        bucket = min(candidates, key=distance)
        scale = max(bucket.width / width, bucket.height / height)
        scaled = max(round(width * scale), bucket.width), max(round(height * scale), bucket.height)
        return Fit(bucket, (width, height), scaled)

    def _sizes(self) -> set[Bucket]:
        least, most = self._options.shortest_side, self._options.longest_side
        step = self._options.bucket_step
        wide = set()
        for width in range(least, most + 1, step):
            height = min(most, self._area // width // step * step)
            if height >= least:
                wide.add(Bucket(width, height))
        return wide | {Bucket(size.height, size.width) for size in wide}

    def _largest_within(self, width: int, height: int) -> Bucket | None:
        step, most = self._options.bucket_step, self._options.longest_side
        wide, high = min(width // step * step, most), min(height // step * step, most)
        if min(wide, high) < self._options.shortest_side or wide * high > self._area:
            return None
        return Bucket(wide, high)


def _covers(width: int, height: int, bucket: Bucket) -> bool:
    return width >= bucket.width and height >= bucket.height
