"""The settings of a data set: its folders, images, captions and cached features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable_candle.errors import ConfigError
from trainable_candle.settings.data import CACHES, CROPS, MASKS, MOST_HUE, MOST_VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Source:
    """One folder of images.

    Raises:
        ConfigError: a value has the wrong type or is outside its range.
    """

    path: Path
    """The folder."""
    caption: str | None = None
    """The caption of images that have none of their own."""
    repeats: float | None = None
    """How often each image occurs in an epoch; 0.5: in every other epoch. None means 1 or, for
    regularisation images, the number that makes them half of an epoch."""
    loss_weight: float = 1.0
    """The factor by which the loss of these images is multiplied."""
    regularization: bool = False
    """Whether these images preserve what the model has learnt of the class (DreamBooth's prior
    preservation). Their loss is also multiplied by `DatasetOptions.prior_loss_weight`, and they get
    no trigger but their own `trigger`."""
    recursive: bool = False
    """Whether folders inside this folder are read too, except hidden folders and `masks`."""
    mask: str | None = None
    """If not None, replaces `DatasetOptions.mask` for these images."""
    trigger: str | None = None
    """If not None, replaces `CaptionOptions.trigger` for these images."""

    def __post_init__(self) -> None:
        """Check every value; convert `path` to a `Path`, and a `mask` of False to `off`."""
        given: Any = self.path
        if not isinstance(given, (str, Path)) or not str(given):
            raise ConfigError(f"dataset: path is {given!r}, expected a folder")
        object.__setattr__(self, "path", Path(given).expanduser())
        for name in ("caption", "trigger"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ConfigError(f"dataset: {name} is {getattr(self, name)!r}, expected text")
        for name in ("regularization", "recursive"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"dataset: {name} is {getattr(self, name)!r}, expected true or false"
                )
        if self.repeats is not None:
            _in_range("repeats", self.repeats, above=0)
        _in_range("loss_weight", self.loss_weight, least=0)
        mask: Any = self.mask
        if mask is False:
            object.__setattr__(self, "mask", "off")  # YAML 1.1 reads off as false.
        if self.mask is not None:
            _one_of("mask", self.mask, MASKS)


@dataclass(frozen=True)
class ColorOptions:
    """How the colours of training images vary, as in torchvision's `ColorJitter`.

    Raises:
        ConfigError: a value is outside its range.
    """

    brightness: float = 0.0
    """All channels are multiplied by a factor from 1 - `brightness` to 1 + `brightness`."""
    contrast: float = 0.0
    """The differences between channels and the image's mean luma are multiplied by a factor from
    1 - `contrast` to 1 + `contrast`."""
    saturation: float = 0.0
    """The differences between a pixel's channels and its luma are multiplied by a factor from
    1 - `saturation` to 1 + `saturation`."""
    hue: float = 0.0
    """The hue turns by at most this fraction of the colour circle, up to 0.5."""
    variants: int = 4
    """The number of random colour changes of an image; each has its own latents."""

    def __post_init__(self) -> None:
        """Check every value."""
        for name in ("brightness", "contrast", "saturation"):
            _in_range(f"color {name}", getattr(self, name), least=0, most=1)
        _in_range("color hue", self.hue, least=0, most=MOST_HUE)
        _whole("color variants", self.variants, 1, MOST_VIEWS)

    @property
    def varies(self) -> bool:
        """Whether any of the four properties varies."""
        return any((self.brightness, self.contrast, self.saturation, self.hue))


@dataclass(frozen=True)
class DatasetOptions:
    """Which images to read, and how to crop them.

    A bucket is a size, in pixels, to which images of similar aspect ratio are resized and cropped.

    Raises:
        ConfigError: a value is outside its range, or two values contradict each other.
    """

    sources: tuple[Source, ...]
    resolution: int = 1024
    """The square root of a bucket's greatest area, px; a multiple of `bucket_step`."""
    bucketing: bool = True
    """Whether to group images by aspect ratio. If off, all images are cropped to a square with
    sides of `resolution`."""
    bucket_step: int = 64
    """The sides of buckets are multiples of this, px; a multiple of 8."""
    min_side: int | None = None
    """Shortest side of a bucket, px (default: a quarter of `resolution`)."""
    max_side: int | None = None
    """Longest side of a bucket, px (default: twice `resolution`)."""
    upscale: bool = False
    """Whether to enlarge images that are smaller than their bucket. If off, such images get a
    smaller bucket (only with `bucketing`), and images that are too small for every bucket are left
    out and counted."""
    crop: str = "center"
    """Where an image is cropped if its bucket has another aspect ratio: `center` or `random`."""
    random_crops: int = 4
    """With `crop="random"`: the number of different crops of an image; each has its own latents."""
    flip: bool = False
    """Mirror each sample horizontally with probability 1/2."""
    color: ColorOptions = field(default_factory=ColorOptions)
    """How the colours vary; not at all by default."""
    mask: str = "off"
    """Where masks come from. The mask of an image weights the loss of each pixel. `off`: no masks;
    `file`: for an image NAME, from the file `NAME-masklabel.png` or a file `masks/NAME`; `alpha`:
    from the image's own alpha channel."""
    prior_loss_weight: float = 1.0
    """The factor by which the loss of regularisation images is multiplied."""
    skip_bad: bool = False
    """Leave out and report images that cannot be used, instead of raising."""

    def __post_init__(self) -> None:
        """Check every value."""
        if not self.sources:
            raise ConfigError("dataset: no folder is given")
        _one_of("crop", self.crop, CROPS)
        _one_of("mask", self.mask, MASKS)
        _in_range("prior_loss_weight", self.prior_loss_weight, least=0)
        for name, least in (("resolution", 8), ("bucket_step", 8)):
            _whole(name, getattr(self, name), least)
        _whole("random_crops", self.random_crops, 1, MOST_VIEWS)
        if self.bucket_step % 8:
            raise ConfigError(
                f"dataset: bucket_step is {self.bucket_step}, expected a multiple of 8 px "
                "(the VAE encodes squares of 8x8 px)"
            )
        if self.resolution % self.bucket_step:
            raise ConfigError(
                f"dataset: resolution is {self.resolution}, "
                f"expected a multiple of bucket_step, {self.bucket_step}"
            )
        for name in ("min_side", "max_side"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), self.bucket_step)
        if not self.shortest_side <= self.resolution <= self.longest_side:
            raise ConfigError(
                f"dataset: buckets have sides from {self.shortest_side} to {self.longest_side} px, "
                f"and the resolution, {self.resolution} px, is outside this range"
            )

    @property
    def shortest_side(self) -> int:
        """`min_side` or its default, rounded up to a multiple of `bucket_step`, px."""
        least = self.min_side or self.resolution // 4
        return -(-least // self.bucket_step) * self.bucket_step

    @property
    def longest_side(self) -> int:
        """`max_side` or its default, rounded down to a multiple of `bucket_step`, px."""
        most = self.max_side or self.resolution * 2
        return most // self.bucket_step * self.bucket_step


@dataclass(frozen=True)
class CaptionOptions:
    """How a caption is transformed each time it is used.

    Random choices depend only on the run's seed, the number of the sample, and the image's file.

    Raises:
        ConfigError: a value is outside its range.
    """

    dropout: float = 0.0
    """Probability of the empty caption, 0 to 1; for classifier-free guidance."""
    shuffle: bool = False
    """Shuffle the tags of a caption; the tags are the parts between separators."""
    keep_tokens: int = 0
    """The number of tags at the start that keep their position and are never left out; a trigger
    that is put before the caption is not counted."""
    tag_dropout: float = 0.0
    """Probability for each tag to be left out, 0 to below 1."""
    separator: str = ","
    """The text that separates tags."""
    trigger: str = ""
    """A tag put before every caption that does not start with it."""
    variants: int = 8
    """How many versions with shuffled or dropped tags a caption has, each with cached text
    features. 0: a new version each time, which needs the text encoders throughout the run."""

    def __post_init__(self) -> None:
        """Check every value."""
        _in_range("caption dropout", self.dropout, least=0, most=1)
        _in_range("tag_dropout", self.tag_dropout, least=0, below=1)
        _whole("keep_tokens", self.keep_tokens, 0)
        _whole("caption variants", self.variants, 0, MOST_VIEWS)
        if not self.separator.strip():
            raise ConfigError(f"dataset: the separator is {self.separator!r}, expected text")


@dataclass(frozen=True)
class CacheOptions:
    """Where latents and text features are kept.

    Raises:
        ConfigError: a value is not allowed.
    """

    kind: str = "disk"
    """`disk`: in files, for later runs too, and in memory; `memory`: for this run; `off`: encoded
    each time."""
    folder: Path | None = None
    """The folder for the files; None: `.trainable-candle` in the first folder of the data set, or
    in the output folder if the data set's folder cannot be written to."""

    def __post_init__(self) -> None:
        """Check every value."""
        _one_of("cache", self.kind, CACHES)


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"dataset: {name} is {value!r}, expected one of {', '.join(choices)}")


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ConfigError(
            f"dataset: {name} is {value!r}, expected a whole number of at least {least}{upper}"
        )


def _in_range(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Check a number; `least` and `most` are allowed values, `above` and `below` are not."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (above < value < below and least <= value <= most)
        or (isinstance(value, int) and value.bit_length() > 1023)  # may be too large for a float
    ):
        bounds = [
            text.format(bound)
            for text, bound in (
                ("of at least {:g}", least),
                ("above {:g}", above),
                ("of at most {:g}", most),
                ("below {:g}", below),
            )
            if math.isfinite(bound)
        ]
        raise ConfigError(f"dataset: {name} is {value!r}, expected a number {' and '.join(bounds)}")
