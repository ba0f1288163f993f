"""Makes a data set from folders of images, and checks all of it before training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainable_candle.data.buckets import Buckets
from trainable_candle.data.dataset import Dataset
from trainable_candle.data.folder import (
    KOHYA_HINT,
    RECURSIVE_HINT,
    SKIP_HINT,
    read_folder,
    unusable,
)
from trainable_candle.data.item import Item
from trainable_candle.data.masks import none_found
from trainable_candle.data.options import CaptionOptions
from trainable_candle.data.summary import describe, nothing_left
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.data.folder import Folder
    from trainable_candle.data.options import DatasetOptions, Source


def load_dataset(
    options: DatasetOptions, captions: CaptionOptions | None = None, seed: int = 0
) -> Dataset:
    """Make a data set: check every image, caption and mask, and fit the images to buckets.

    Args:
        options: the folders and their settings.
        captions: the transformations of captions; none by default.
        seed: the seed of all random choices, at least 0.

    Raises:
        DatasetError: a folder is missing, is a file, has no images or is the output of a run; a
            `metadata.jsonl` is wrong; some images of a folder cannot be used and `skip_bad` is off
            (the message names the first ten of them); or no image is usable and large enough.
        ConfigError: only regularisation images are usable, or no image of a folder has a mask of
            the kind that the folder's own `mask` names.
        OSError: a folder cannot be listed.
    """
    captions = captions or CaptionOptions()
    buckets = Buckets(options)
    folders: list[Folder] = []
    by_folder: list[list[Item]] = []
    too_small: list[str] = []
    for source in options.sources:
        mask = source.mask or options.mask
        # If the folder has no images, the error suggests reading the folders inside it. A recursive
        # source has read them already. The hint about kohya's names, which set `repeats`, is only
        # for a source without `repeats`.
        hint = KOHYA_HINT if source.repeats is None else RECURSIVE_HINT
        if source.recursive:
            hint = ""
        folder = read_folder(source, masks=mask == "file", hint=hint)
        if folder.problems and not options.skip_bad:
            raise unusable(folder.path, folder.count, folder.problems, SKIP_HINT)
        folders.append(folder)
        prior_weight = options.prior_loss_weight if source.regularization else 1
        loss_weight = source.loss_weight * prior_weight
        trigger = _trigger(source, captions)
        items = []  # those of this folder that are not too small
        for image in folder.images:
            fit = buckets.fit(image.width, image.height)
            if fit is None:
                too_small.append(f"{image.path}: {image.width}x{image.height}")
            else:
                # `_balance` sets the repeats below.
                items.append(Item(image, fit, trigger, loss_weight, repeats=1.0, mask=mask))
        found_mask = any(item.has_mask for item in items)
        if source.mask not in {None, "off"} and items and not found_mask:
            reason = none_found(mask, items[0].image.path)
            raise ConfigError(f"dataset: {source.path}: mask: {mask} {reason}")
        by_folder.append(items)
    if not any(by_folder):
        raise nothing_left(options, folders, too_small)
    _balance(by_folder, options.sources)
    all_items = [item for items in by_folder for item in items]
    summary = describe(by_folder, options, folders, too_small)
    return Dataset(all_items, options, captions, seed, summary)


def _trigger(source: Source, captions: CaptionOptions) -> str:
    """Return the trigger of a source's captions: its own, or the run's for images to learn."""
    if source.trigger is not None:
        return source.trigger
    return "" if source.regularization else captions.trigger


def _balance(by_folder: list[list[Item]], sources: Sequence[Source]) -> None:
    """Set, in place, how often the images of each folder occur in an epoch.

    If the source of a folder has `repeats`, its images occur that often. If it has none, images to
    learn occur once. Regularisation images of sources without `repeats` occur equally often; in
    total, they have as many occurrences as the images to learn.

    Raises:
        ConfigError: there are no images to learn.
    """
    to_learn = sum(
        len(items) * (source.repeats or 1)
        for items, source in zip(by_folder, sources, strict=True)
        if not source.regularization
    )
    if not to_learn:
        raise ConfigError(
            "dataset: all usable images are regularisation images; expected images to learn, too"
        )
    to_repeat = sum(
        len(items)
        for items, source in zip(by_folder, sources, strict=True)
        if source.regularization and source.repeats is None
    )
    for index, source in enumerate(sources):
        repeats = source.repeats or 1.0
        # If `to_repeat` is 0, this folder has no usable images.
        if source.regularization and source.repeats is None and to_repeat:
            repeats = to_learn / to_repeat
        by_folder[index] = [replace(item, repeats=repeats) for item in by_folder[index]]
