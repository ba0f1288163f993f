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
    """The size that all images of a batch have, px."""

    width: int
    height: int

    def __str__(self) -> str:
        """Format as width x height."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Frame:
    """The crop of an image, px, on which a model trains. SDXL is conditioned on these values."""

    original: tuple[int, int]
    """Width and height of the image before it is scaled."""
    left: int
    """First column of the crop in the scaled image, or in its mirror image for a mirrored crop."""
    top: int
    """First row of the crop in the scaled image."""
    bucket: Bucket
    """The size of the crop."""

    @classmethod
    def whole(cls, width: int, height: int) -> Frame:
        """Return the frame of a whole image, neither scaled nor cropped."""
        return cls((width, height), left=0, top=0, bucket=Bucket(width, height))


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
        """How many columns and how many rows of the scaled image are cropped away."""
        return self.scaled[0] - self.bucket.width, self.scaled[1] - self.bucket.height

    @property
    def lost(self) -> float:
        """The fraction of the image's area that is cropped away, from 0 to below 1."""
        return 1 - self.bucket.width * self.bucket.height / (self.scaled[0] * self.scaled[1])

    def corner(self, across: float = 0.5, down: float = 0.5) -> tuple[int, int]:
        """Return the first column and the first row of a crop in the scaled image.

        Args:
            across: where the crop is, from 0 (at the left edge) to 1 (at the right edge).
            down: where the crop is, from 0 (at the top) to 1 (at the bottom).
        """
        columns, rows = self.margin
        return round(columns * across), round(rows * down)

    def frame(self, left: int, top: int, *, flipped: bool = False) -> Frame:
        """Return the frame of a crop.

        Args:
            left: the crop's first column in the scaled image, which is not mirrored.
            top: the crop's first row.
            flipped: whether the crop is mirrored.
        """
        return Frame(self.original, self.margin[0] - left if flipped else left, top, self.bucket)

    def cut(self, image: Image.Image, left: int, top: int, *, flipped: bool = False) -> Image.Image:
        """Return an image, scaled and then cropped to the bucket, and mirrored if `flipped`.

        Args:
            image: the image, or its mask, which may have any size.
            left: the crop's first column in the scaled image.
            top: the crop's first row.
            flipped: whether to mirror the crop.
        """
        if image.size != self.scaled:
            image = image.resize(self.scaled, Image.Resampling.LANCZOS)
        image = image.crop((left, top, left + self.bucket.width, top + self.bucket.height))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else image


class Buckets:
    """The buckets that `DatasetOptions` allow, and the choice of a bucket for an image.

    The sides of a full-size bucket are multiples of `bucket_step`, from `shortest_side` to
    `longest_side`. Its area is at most that of a square with sides of `resolution`, and one side is
    the longest that is possible with the other. Without bucketing, the square is the only bucket.

    An image goes to one of its candidates: the one with the nearest aspect ratio, and the larger of
    two that are equally near. If images may be enlarged, all full-size buckets are candidates.
    Otherwise the candidates are the full-size buckets that the image covers and, with bucketing, a
    bucket whose sides are the largest multiples of `bucket_step` within the image's sides and
    `longest_side`. This last bucket is no candidate if its area exceeds the square's or if a side
    is below `shortest_side`.
    """

    def __init__(self, options: DatasetOptions) -> None:
        self._options = options
        self._area = options.resolution**2
        square = Bucket(options.resolution, options.resolution)
        self.full: tuple[Bucket, ...] = (square,)
        """The full-size buckets."""
        if options.bucketing:
            self.full = tuple(sorted({square, *self._full_size()}))

    def fit(self, width: int, height: int) -> Fit | None:
        """Return how an image is fitted to a bucket; None if it is too small for every bucket."""

        def distance(bucket: Bucket) -> tuple[float, int]:
            apart = math.log(bucket.width / bucket.height) - math.log(width / height)
            # Rounded, because rounding errors would separate ratios that are equally near.
            return round(abs(apart), 9), -bucket.width * bucket.height

        if self._options.upscale:
            candidates = list(self.full)
        else:
            candidates = [bucket for bucket in self.full if _covers(width, height, bucket)]
            if self._options.bucketing and (largest := self._largest_within(width, height)):
                candidates.append(largest)
        if not candidates:
            return None
        bucket = min(candidates, key=distance)
        scale = max(bucket.width / width, bucket.height / height)
        scaled = max(round(width * scale), bucket.width), max(round(height * scale), bucket.height)
        return Fit(bucket, (width, height), scaled)

    def _full_size(self) -> set[Bucket]:
        """Return, for each width, the tallest bucket; and for each height, the widest one."""
        least, most = self._options.shortest_side, self._options.longest_side
        step = self._options.bucket_step
        tallest = set()
        for width in range(least, most + 1, step):
            height = min(most, self._area // width // step * step)
            if height >= least:
                tallest.add(Bucket(width, height))
        return tallest | {Bucket(bucket.height, bucket.width) for bucket in tallest}

    def _largest_within(self, width: int, height: int) -> Bucket | None:
        """Return the largest bucket within an image's sides; None if it is no candidate."""
        step, most = self._options.bucket_step, self._options.longest_side
        largest = Bucket(min(width // step * step, most), min(height // step * step, most))
        too_short = min(largest.width, largest.height) < self._options.shortest_side
        if too_short or largest.width * largest.height > self._area:
            return None
        return largest


def _covers(width: int, height: int, bucket: Bucket) -> bool:
    return width >= bucket.width and height >= bucket.height
