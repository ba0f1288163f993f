"""Settings of the model and its data: paths, images, captions.

The short help omits settings that are `rare`. A resumed run may change the value of a `free`
setting and still compute what the earlier run would have computed. `setting.py` has the other
arguments of `Setting`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.errors import ConfigError
from trainable_candle.placement import AUTO
from trainable_candle.settings import sections
from trainable_candle.settings.machine import FORMATS, SAME, STORED
from trainable_candle.settings.setting import Condition, Group, Setting

CROPS: Final = ("center", "random")
MASKS: Final = ("off", "file", "alpha")
CACHES: Final = ("disk", "memory", "off")
MOST_VIEWS: Final = 1000
"""The largest number of crops, of colour variants and of tag orders of an image; each of them is
encoded and cached."""
MOST_HUE: Final = 0.5
"""The largest hue change, as a share of the colour circle: half of it, in either direction, reaches
every hue."""
YAML_SUFFIXES: Final = (".yaml", ".yml")
"""Endings of files that list the folders of a dataset."""


def _one_path(value: Any) -> Any:
    """Return the value itself if it may be the path of a data set.

    Raises:
        ConfigError: the value is a list or a mapping, which belongs in a file of its own.
    """
    if isinstance(value, (list, dict)):
        raise ConfigError(
            f"dataset is {value!r}, expected one path; list several folders in a YAML file of "
            "their own, and give the path of that file"
        )
    return value


def _side(value: Any) -> Any:
    """Return a resolution as one number; kohya's scripts also write two sides, as in 1024,1024.

    Returns a value that is not such a text unchanged.

    Raises:
        ConfigError: the sides differ.
    """
    if not isinstance(value, str):
        return value
    sides = [side.strip() for side in value.lower().replace("x", ",").split(",")]
    if not all(side.isdecimal() for side in sides):
        return value
    if len(set(sides)) > 1:
        raise ConfigError(
            f"resolution is {value}, expected one number N: images have N x N px of area, in their "
            "own aspect ratios"
        )
    return int(sides[0])


@dataclass(frozen=True)
class Data(Group):
    """The model, its data and the folder for results, which every task needs."""

    section: ClassVar[str] = sections.MODEL

    model: Annotated[str, Setting("name of a model; see `trainable-candle info`")] = ""
    weights: Annotated[
        str,
        Setting(
            "folder, file or hub name; see --help-all",
            synonyms=(
                "pretrained-model-name-or-path",
                "base-model-name",
                "checkpoint",
                "ckpt",
                "model.name-or-path",
            ),
            path=True,
        ),
    ] = ""
    dataset: Annotated[
        str,
        Setting(
            "images with .txt captions, or texts",
            synonyms=("train-data-dir", "instance-data-dir", "data"),
            path=True,
            read=_one_path,
        ),
    ] = ""
    output: Annotated[
        str,
        Setting(
            "folder for adapter, checkpoints and logs",
            free=True,
            synonyms=("output-dir", "out"),
            path=True,
        ),
    ] = ""


@dataclass(frozen=True)
class DefaultCaption(Group):
    """The caption that images without a caption of their own get."""

    section: ClassVar[str] = sections.CAPTIONS

    caption: Annotated[
        str | None, Setting("caption of images without a .txt file", rare=True, tokenized=True)
    ] = None


@dataclass(frozen=True)
class Unusable(Group):
    """The treatment of examples that cannot be used."""

    section: ClassVar[str] = sections.MODEL

    skip_bad: Annotated[bool, Setting("leave out examples that cannot be read", rare=True)] = False


@dataclass(frozen=True)
class Parts(Group):
    """Text encoders and the autoencoder, which may be in files outside `weights`."""

    section: ClassVar[str] = sections.MODEL

    text_encoder: Annotated[
        list[str],
        Setting(
            "path of a text encoder outside --weights; repeat for several",
            texts=True,
            rare=True,
            path=True,
        ),
    ] = field(default_factory=list)
    vae: Annotated[
        str | None,
        Setting(
            "path of the autoencoder if it is outside --weights",
            rare=True,
            path=True,
            synonyms=("ae",),
        ),
    ] = None
    text_encoder_precision: Annotated[
        str,
        Setting(
            "format of the text encoders' linear layers; stored: each in the format of its file",
            # SAME: the dtype of computation; FORMATS: quantized, such as int8.
            (AUTO, SAME, STORED, *FORMATS),
            rare=True,
        ),
    ] = AUTO

    def text_encoder_format(self, stored: str | None) -> str | None:
        """Return the format of a text encoder's linear layers; None if they are not quantized.

        `auto` counts as not quantized: a plan that quantizes has replaced it by a format.

        Args:
            stored: the quantized format in which the text encoder's file stores these layers; None
                if there is none.
        """
        if self.text_encoder_precision == STORED:
            return stored
        return self.text_encoder_precision if self.text_encoder_precision in FORMATS else None


@dataclass(frozen=True)
class Images(Group):
    """Sizes, crops, colours, masks and caches of images."""

    section: ClassVar[str] = sections.IMAGES
    # Each: settings, the condition without which they have no effect, and the flags that meet it.
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("random_crops",), lambda c: c.crop == "random", "--crop random"),
        Condition(
            ("color_variants",),
            lambda c: any((c.color_brightness, c.color_contrast, c.color_saturation, c.color_hue)),
            "--color-brightness, --color-contrast, --color-saturation or --color-hue",
        ),
        Condition(("min_side", "max_side"), lambda c: c.bucketing, "--bucketing"),
        Condition(("cache_dir",), lambda c: c.cache == "disk", "--cache disk"),
    )

    resolution: Annotated[
        int | None,
        Setting(
            "images have N x N px of area (default: model's)",
            low=8,
            section=sections.MODEL,
            read=_side,
        ),
    ] = None
    bucketing: Annotated[
        bool,
        Setting(
            "keep the aspect ratios of images", rare=True, synonyms=("aspect-ratio-bucketing",)
        ),
    ] = True
    bucket_step: Annotated[
        int | None,
        Setting(
            "sides of images are multiples of N px (default: at most 64)",
            low=8,
            rare=True,
            synonyms=("bucket-reso-steps",),
        ),
    ] = None
    min_side: Annotated[
        int | None,
        Setting(
            "shortest side of an image, px (default: resolution / 4)",
            low=8,
            rare=True,
            synonyms=("min-bucket-reso",),
        ),
    ] = None
    max_side: Annotated[
        int | None,
        Setting(
            "longest side of an image, px (default: resolution x 2)",
            low=8,
            rare=True,
            synonyms=("max-bucket-reso",),
        ),
    ] = None
    upscale: Annotated[bool, Setting("enlarge images that are too small", rare=True)] = False
    crop: Annotated[str, Setting("which part of an image to keep", choices=CROPS, rare=True)] = (
        "center"
    )
    random_crops: Annotated[
        int, Setting("cached crops per image", low=1, high=MOST_VIEWS, rare=True)
    ] = 4
    flip: Annotated[
        bool,
        Setting(
            "mirror half of the images, at random",
            rare=True,
            synonyms=("flip-aug", "enable-random-flip"),
        ),
    ] = False
    color_brightness: Annotated[
        float,
        Setting(
            "vary brightness by up to this share",
            low=0,
            high=1,
            rare=True,
            synonyms=("random-brightness-max-strength",),
        ),
    ] = 0.0
    color_contrast: Annotated[
        float,
        Setting(
            "vary contrast by up to this share",
            low=0,
            high=1,
            rare=True,
            synonyms=("random-contrast-max-strength",),
        ),
    ] = 0.0
    color_saturation: Annotated[
        float,
        Setting(
            "vary saturation by up to this share",
            low=0,
            high=1,
            rare=True,
            synonyms=("random-saturation-max-strength",),
        ),
    ] = 0.0
    color_hue: Annotated[
        float,
        Setting("turn hues by up to this share of the circle", low=0, high=MOST_HUE, rare=True),
    ] = 0.0
    color_variants: Annotated[
        int, Setting("cached colour variants per image", low=1, high=MOST_VIEWS, rare=True)
    ] = 4
    mask: Annotated[
        str, Setting("weigh the loss by a mask file or the alpha channel", choices=MASKS, rare=True)
    ] = "off"
    prior_loss_weight: Annotated[
        float, Setting("weight of regularization images in the loss", low=0, rare=True)
    ] = 1.0
    cache: Annotated[
        str,
        Setting("where to keep latents and text features", choices=CACHES, rare=True, free=True),
    ] = "disk"
    cache_dir: Annotated[
        str | None,
        Setting(
            "folder of the disk cache (default: .trainable-candle in the dataset)",
            rare=True,
            free=True,
            path=True,
        ),
    ] = None


def _varies(config: Any) -> bool:
    """Return whether samples get variants of their captions: tags in another order, or fewer."""
    varies: bool = config.caption_shuffle or config.caption_tag_dropout > 0
    return varies


def _joins_tags(config: Any) -> bool:
    """Return whether the run may write the separator between tags."""
    # A YAML file as the dataset lists folders, and each folder may have its own trigger.
    return _varies(config) or bool(config.trigger) or config.dataset.endswith(YAML_SUFFIXES)


@dataclass(frozen=True)
class Captions(Group):
    """Changes to captions: a trigger, empty captions, and the order and omission of tags."""

    section: ClassVar[str] = sections.CAPTIONS
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("caption_keep_tokens", "caption_variants"),
            _varies,
            "--caption-shuffle or --caption-tag-dropout",
        ),
        Condition(
            ("caption_separator",),
            _joins_tags,
            "--caption-shuffle, --caption-tag-dropout or --trigger",
        ),
    )

    trigger: Annotated[
        str,
        Setting(
            "tag put before every caption", rare=True, tokenized=True, synonyms=("trigger-word",)
        ),
    ] = ""
    caption_dropout: Annotated[
        float,
        Setting(
            "share of captions that are replaced by an empty one",
            low=0,
            high=1,
            rare=True,
            synonyms=("caption-dropout-rate",),
        ),
    ] = 0.0
    caption_shuffle: Annotated[
        bool,
        Setting(
            "shuffle the tags", rare=True, synonyms=("shuffle-caption", "enable-tag-shuffling")
        ),
    ] = False
    caption_keep_tokens: Annotated[
        int,
        Setting(
            "number of first tags that stay in place",
            low=0,
            rare=True,
            synonyms=("keep-tokens", "keep-tags-count"),
        ),
    ] = 0
    caption_tag_dropout: Annotated[
        float,
        Setting(
            "share of tags that are left out",
            low=0,
            below=1,
            rare=True,
            synonyms=("caption-tag-dropout-rate",),
        ),
    ] = 0.0
    caption_separator: Annotated[str, Setting("text that separates tags", rare=True)] = ","
    caption_variants: Annotated[
        int,
        Setting(
            "cached tag orders per caption; 0: a new order each time",
            low=0,
            high=MOST_VIEWS,
            rare=True,
        ),
    ] = 8
