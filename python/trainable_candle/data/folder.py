"""Folders of images with captions and masks, checked completely before training."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.data.captions import CAPTION_SUFFIXES, METADATA, read_caption, read_metadata
from trainable_candle.data.masks import FOLDER, is_mask, mask_of, mask_problem
from trainable_candle.data.options import Source
from trainable_candle.data.pixels import SUFFIXES, in_parallel, probe
from trainable_candle.errors import DatasetError
from trainable_candle.outputs import require_no_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The ends of error messages. `10_a cup` is a name as in kohya's scripts.
RECURSIVE_HINT: Final = "; folders inside it are read with `recursive: true` in a YAML file"
KOHYA_HINT: Final = (
    f"{RECURSIVE_HINT}, or if their names are like `10_a cup` (10: how often each image is seen in "
    "an epoch)"
)
SKIP_HINT: Final = " (--skip-bad leaves such images out)"
_SHOWN: Final = 10
"""The greatest number of lines about images or files in a message."""
_TABLE: Final = "metadata.csv"
"""A file of captions that Hugging Face's `imagefolder` reads and this library does not."""
_EXPECTED: Final = frozenset({*CAPTION_SUFFIXES, ".json", ".jsonl", ".yaml", ".yml", ".md"})
"""Suffixes of files other than images that the summary does not list."""


@dataclass(frozen=True)
class ImageFile:
    """One image that can be read, and its caption."""

    path: Path
    caption: str
    width: int
    """The width in pixels, after the rotation that EXIF prescribes."""
    height: int
    """The height in pixels, after this rotation."""
    digest: str
    """A hash of the file's bytes, 32 hexadecimal digits."""
    mask: Path | None = None
    """The file of the mask; None if there is none or masks are not read."""
    transparent: bool = False
    """Whether the image has an alpha channel, or a colour that stands for transparency."""


@dataclass(frozen=True)
class Folder:
    """The contents of a folder."""

    path: Path
    images: tuple[ImageFile, ...]
    """The usable images, sorted by path."""
    problems: tuple[str, ...]
    """What is wrong with each unusable image."""
    others: tuple[tuple[str, int], ...]
    """The suffixes of files that are not read, except `_EXPECTED`, each with the number of such
    files. `without a suffix` stands for no suffix."""

    @property
    def count(self) -> int:
        """The number of images, usable or not."""
        return len(self.images) + len(self.problems)


def check_folder(folder: str | Path, caption: str | None = None) -> list[ImageFile]:
    """Return every image in `folder`, sorted by path, each decoded once.

    Images in folders inside it are included only if its `metadata.jsonl` names them.

    Args:
        folder: the folder of images.
        caption: the caption of images that have none of their own.

    Returns:
        The images; at least one.

    Raises:
        DatasetError: the folder is missing, is a file, has no images or is the output of a run; its
            `metadata.jsonl` is wrong; or some images cannot be read or have no caption (the message
            names the first ten of them).
        OSError: the folder cannot be listed.
    """
    found = read_folder(Source(Path(folder), caption))
    if found.problems:
        raise unusable(found.path, found.count, found.problems)
    return list(found.images)


def read_folder(source: Source, *, masks: bool = False, hint: str = "") -> Folder:
    """Check every image of a folder, each decoded once, in parallel.

    An image's caption is in a `.txt` or `.caption` file (UTF-8) that is named like the image; else
    in a `metadata.jsonl`, which may also name images in folders below its own; else it is
    `source.caption`. Hidden files and masks are not read as images.

    Args:
        source: the folder, the caption of images without one, and whether to read inner folders.
        masks: whether to look for mask files.
        hint: the end of the error message about a folder without images.

    Returns:
        The images, and what is wrong with each unusable image.

    Raises:
        DatasetError: the folder is missing, is a file or has no images, a `metadata.jsonl` is
            wrong, or a folder that is read is the output of a run.
        OSError: the folder cannot be listed.
    """
    folder = source.path
    if not folder.exists():
        raise DatasetError(f"dataset: there is no folder {folder}")
    if not folder.is_dir():
        raise DatasetError(f"dataset: {folder} is a file, expected a folder of images")
    files = list(_files(folder, recursive=source.recursive))
    listed = _listed(files, folder)
    paths = sorted({*(path for path in files if _is_image(path)), *listed})
    if not paths:
        raise DatasetError(
            f"dataset: {folder} holds no images; expected files ending in {', '.join(SUFFIXES)}"
            f"{hint}"
        )

    def check(path: Path) -> ImageFile | str:
        return _check(path, listed.get(path), source.caption, masks=masks)

    results = list(in_parallel(check, paths))
    others = Counter(
        path.suffix.lower() or "without a suffix"
        for path in files
        if path.suffix.lower() not in {*SUFFIXES, *_EXPECTED}
    )
    return Folder(
        folder,
        tuple(result for result in results if isinstance(result, ImageFile)),
        tuple(result for result in results if isinstance(result, str)),
        tuple(sorted(others.items())),
    )


def unusable(folder: Path, count: int, problems: Sequence[str], hint: str = "") -> DatasetError:
    """Return the error for the `problems` of some of `count` images; it shows the first ten."""
    return DatasetError(
        f"dataset: {len(problems)} of {counted(count, 'image')} in {folder} cannot be used"
        f"{hint}:\n  " + "\n  ".join(first_lines(problems))
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is singular for 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first ten lines and, if there are more, a line that counts the rest."""
    shown = list(lines[:_SHOWN])
    return [*shown, f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else shown


def _files(folder: Path, *, recursive: bool) -> Iterator[Path]:
    """Yield the files in a folder and, if `recursive`, in the folders below it.

    Hidden files, hidden folders and folders of masks are left out; links to folders are not
    followed.
    """

    def raise_error(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=raise_error):
        # Raises DatasetError if the folder is the output of a run.
        require_no_output(Path(place))
        # `os.walk` goes on to the folders that stay in this list.
        folders[:] = [n for n in folders if recursive and not n.startswith(".") and n != FOLDER]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _listed(files: Sequence[Path], folder: Path) -> dict[Path, str]:
    """Return the captions of every `metadata.jsonl` among `files`, by the path of the image.

    Raises:
        DatasetError: a `metadata.jsonl` is wrong, or names files that do not exist.
    """
    listed = {
        image: caption
        for path in files
        if path.name == METADATA
        for image, caption in read_metadata(path.parent).items()
    }
    # `Path.is_file` raises for invalid file names; `os.path.isfile` does not.
    missing = sorted(str(path) for path in listed if not os.path.isfile(path))  # noqa: PTH113
    if missing:
        raise DatasetError(
            f"dataset: {METADATA} in {folder} names {counted(len(missing), 'missing file')}:\n  "
            + "\n  ".join(first_lines(missing))
        )
    return listed


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not is_mask(path)


def _check(path: Path, listed: str | None, default: str | None, *, masks: bool) -> ImageFile | str:
    """Check an image; returns it, or what is wrong with it.

    Args:
        path: the image.
        listed: its caption in a `metadata.jsonl`; None without one.
        default: the caption if the image has none of its own; if None, such an image is unusable.
        masks: whether to look for a mask.
    """
    if not path.is_file():
        return f"{path}: is not a regular file"
    try:
        facts = probe(path)
        caption = read_caption(path)
        mask = mask_of(path) if masks else None
        if mask is not None and (problem := mask_problem(mask, facts)):
            return problem
    except DatasetError as error:
        return str(error)
    if caption is None:
        caption = default if listed is None else listed
    if caption is None:
        text = path.with_suffix(".txt")
        if (path.parent / _TABLE).exists():
            return f"{path}: no caption; {_TABLE} is not read, write {METADATA} or {text.name}"
        return (
            f"{path}: no caption; write {text.name} beside it, or give --caption for all images "
            "without one"
        )
    return ImageFile(
        path, caption, facts.width, facts.height, facts.digest, mask, facts.transparent
    )
