"""Reads the images and captions of a run, with the options that its settings give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.data import (
    CacheOptions,
    CaptionOptions,
    ColorOptions,
    Dataset,
    DatasetOptions,
    cache_folder,
    load_dataset,
    parse_sources,
)
from trainable_candle.data.masks import none_found
from trainable_candle.errors import ConfigError
from trainable_candle.tasks.task import Split, held_out_items, naming_validation

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.settings import TrainConfig

_STEPS: Final = (64, 32, 16, 8)
"""The bucket steps that `default_bucket_step` chooses from, px, in falling order.

The sides of the crops of all buckets are multiples of the bucket step.
"""


def dataset_options(config: TrainConfig, dataset: str, resolution: int) -> DatasetOptions:
    """Return the options for images, from the settings.

    Args:
        config: the settings.
        dataset: a folder, or a YAML file with a list of folders.
        resolution: the square root of the greatest area of a crop, px.

    Raises:
        ConfigError: an entry of the list is wrong, two settings contradict each other, or the run
            would write into a folder that it reads.
        DatasetError: the YAML file cannot be read, or a folder is the output of a run.
    """
    sources = parse_sources(dataset, config.caption)
    output = Path(config.output).expanduser().resolve()
    # The output must not be a folder that the run reads, or below one whose subfolders it reads.
    for source in sources if config.output else ():
        folder = source.path.resolve()
        if output == folder or (source.recursive and folder in output.parents):
            raise ConfigError(
                f"dataset: the run would write into {source.path}, whose images it reads; choose "
                "another --output"
            )
    step = config.bucket_step or default_bucket_step(resolution)
    return DatasetOptions(
        sources,
        resolution=resolution,
        bucketing=config.bucketing,
        bucket_step=step,
        min_side=config.min_side,
        max_side=config.max_side,
        upscale=config.upscale,
        crop=config.crop,
        random_crops=config.random_crops,
        flip=config.flip,
        color=ColorOptions(
            brightness=config.color_brightness,
            contrast=config.color_contrast,
            saturation=config.color_saturation,
            hue=config.color_hue,
            variants=config.color_variants,
        ),
        mask=config.mask,
        prior_loss_weight=config.prior_loss_weight,
        skip_bad=config.skip_bad,
    )


def default_bucket_step(resolution: int) -> int:
    """Return the largest step among 64, 32, 16 and 8 px that suits the resolution; else 8 px.

    A step suits if it divides the resolution and is at most a quarter of the resolution: larger
    steps allow only few buckets.
    """
    suitable = (step for step in _STEPS if resolution % step == 0 and resolution >= 4 * step)
    return next(suitable, _STEPS[-1])


def caption_options(config: TrainConfig) -> CaptionOptions:
    """Return the options for captions, from the settings.

    Raises:
        ConfigError: two settings contradict each other.
    """
    return CaptionOptions(
        dropout=config.caption_dropout,
        shuffle=config.caption_shuffle,
        keep_tokens=config.caption_keep_tokens,
        tag_dropout=config.caption_tag_dropout,
        separator=config.caption_separator,
        trigger=config.trigger,
        variants=config.caption_variants,
    )


def cache_options(config: TrainConfig) -> CacheOptions:
    """Return the options for caches, from the settings."""
    folder = Path(config.cache_dir).expanduser() if config.cache_dir else None
    return CacheOptions(config.cache, folder)


def load_images(config: TrainConfig, folder: str, resolution: int) -> Dataset:
    """Return the checked images of a folder, or of the folders that a YAML file lists.

    Raises:
        DatasetError: images or captions cannot be used.
        ConfigError: settings contradict each other or have no effect on the images, or the run
            would write into a folder that it reads.
    """
    options = dataset_options(config, folder, resolution)
    return load_dataset(options, caption_options(config), config.seed)


def read_datasets(config: TrainConfig, load: Callable[[str], Dataset]) -> Split[Dataset]:
    """Return the checked images of a run, for training and for validation.

    Args:
        config: the settings.
        load: returns the checked images of a folder, or of the folders that a YAML file lists.

    Raises:
        DatasetError: images or captions cannot be used, or there are too few images to hold some
            out.
        ConfigError: settings contradict each other, or have no effect on these images.
    """
    dataset = load(config.dataset)
    sources = dataset.options.sources
    if config.prior_loss_weight != 1 and not any(s.regularization for s in sources):
        raise ConfigError(
            "--prior-loss-weight has no effect: no folder of the dataset is for regularization"
        )
    if config.mask != "off" and not any(item.has_mask for item in dataset.items):
        end_of_message = none_found(config.mask, dataset.items[0].image.path)
        raise ConfigError(f"--mask {config.mask} {end_of_message}")
    if config.validation_dataset:
        with naming_validation():  # Errors name `validation_dataset` instead of `dataset`.
            # `fixed`: without random crops, mirroring and changes of colours.
            return Split(dataset, load(config.validation_dataset).fixed())
    if not config.validation_split:
        return Split(dataset)
    held_out = set(held_out_items(len(dataset), config.validation_split, config.seed))
    trained = [index for index in range(len(dataset)) if index not in held_out]
    return Split(dataset.part(trained), dataset.part(sorted(held_out)).fixed())


def folder_for_cache(
    config: TrainConfig, dataset: Dataset, report: Callable[[str], None]
) -> Path | None:
    """Return the folder of cached latents and text features; None without a disk cache.

    Args:
        config: the settings.
        dataset: the images; by default, the cache is in their first folder.
        report: gets a line if the cache is in the output folder of the run, because that first
            folder cannot be written to.

    Raises:
        ConfigError: none of the possible folders can be written to.
    """
    output = Path(config.output).expanduser()
    folder, note = cache_folder(cache_options(config), dataset.options, output)
    if note:
        report(note)
    return folder
