"""The summary of a set of images before training: its folders, its buckets, what is left out.

A bucket is a size to which images of similar proportions are scaled and cropped.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from trainable_candle.data.folder import counted, first_lines
from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.data.buckets import Bucket
    from trainable_candle.data.folder import Folder
    from trainable_candle.data.item import Item
    from trainable_candle.data.options import DatasetOptions


def describe(
    by_folder: Sequence[Sequence[Item]],
    options: DatasetOptions,
    folders: Sequence[Folder],
    small: Sequence[str],
) -> str:
    """Return the summary of a data set.

    Args:
        by_folder: the images that are trained on, one sequence for each folder in `folders`.
        options: the settings.
        folders: what each folder contains, in the order of `options.sources`.
        small: one line for each image that is too small for every bucket.
    """
    items = [item for group in by_folder for item in group]
    # The number of samples in an epoch; `repeats` may be fractions.
    seen = sum(item.repeats for item in items)
    lines = [f"dataset: {counted(len(items), 'image')}, {seen:g} per epoch"]
    lines += _folders(by_folder, options, folders)
    lines += _buckets(items)
    if small:
        lines.append(f"left out: {counted(len(small), 'image')} {_too_small(options)}")
        lines += [f"  {line}" for line in first_lines(small)]
    problems = [problem for folder in folders for problem in folder.problems]
    if problems:
        lines.append(f"left out: {counted(len(problems), 'image')} that cannot be used")
        lines += [f"  {line}" for line in first_lines(problems)]
    for folder in folders:
        # `others` has the suffixes of files that are not read, each with the number of files.
        if folder.others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in folder.others)
            lines.append(f"not read in {folder.path}: {kinds}")
    return "\n".join(lines)


def nothing_left(
    options: DatasetOptions, folders: Sequence[Folder], small: Sequence[str]
) -> DatasetError:
    """Return the error for a data set that has no image to train on.

    Args:
        options: the settings.
        folders: what each folder contains.
        small: one line for each image that is too small for every bucket.
    """
    problems = [problem for folder in folders for problem in folder.problems]
    reasons = []
    if small:
        reasons.append(f"{counted(len(small), 'image')} {_too_small(options)}")
    if problems:
        reasons.append(f"{counted(len(problems), 'image')} that cannot be used")
    where = ", ".join(str(folder.path) for folder in folders)
    return DatasetError(
        f"dataset: nothing to train on in {where}: {' and '.join(reasons)}:\n  "
        + "\n  ".join(first_lines([*small, *problems]))
    )


def _too_small(options: DatasetOptions) -> str:
    """Return the words that follow the number of too small images, with two cures."""
    shortest_side = options.shortest_side if options.bucketing else options.resolution
    return (
        f"smaller than the smallest bucket, {shortest_side} px per side "
        "(give --upscale to enlarge them, or a lower --resolution)"
    )


def _folders(
    by_folder: Sequence[Sequence[Item]], options: DatasetOptions, folders: Sequence[Folder]
) -> list[str]:
    """Return one line for each folder."""
    lines = []
    for group, folder, source in zip(by_folder, folders, options.sources, strict=True):
        # The images of a folder have the same `repeats`, `loss_weight` and `mask`.
        facts = [counted(len(group), "image")]
        if group and group[0].repeats != 1:
            facts.append(f"{group[0].repeats:.4g} times each")
        if group and group[0].loss_weight != 1:
            facts.append(f"loss times {group[0].loss_weight:g}")
        if source.regularization:
            facts.append("regularisation")
        if group and group[0].mask == "file":
            facts.append(f"{sum(item.image.mask is not None for item in group)} with masks")
        if group and group[0].mask == "alpha":
            facts.append("alpha as mask")
        blank = sum(not item.image.caption for item in group)
        if blank:
            facts.append(f"{blank} with an empty caption")
        lines.append(f"  {folder.path}: {', '.join(facts)}")
    return lines


def _buckets(items: Sequence[Item]) -> list[str]:
    """Return the lines of a table with one row for each bucket, after the row of headings."""
    by_bucket: dict[Bucket, list[Item]] = defaultdict(list)
    for item in items:
        by_bucket[item.fit.bucket].append(item)
    rows = [("bucket", "images", "per epoch", "cut off at most")]
    for bucket, members in sorted(by_bucket.items()):
        seen = sum(item.repeats for item in members)
        # The largest fraction of an image's area that is cropped away.
        lost = max(item.fit.lost for item in members)
        rows.append((str(bucket), str(len(members)), f"{seen:.4g}", f"{100 * lost:.0f} %"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
