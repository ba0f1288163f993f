"""A folder of pictures with captions, checked as a whole before anything is trained."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image, ImageOps

from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    import numpy.typing as npt

SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
_SHOWN: Final = 10


@dataclass(frozen=True)
class Picture:
    """One picture that can be read, and its caption."""

    path: Path
    caption: str
    width: int
    height: int


def check_folder(folder: str | Path, caption: str | None = None) -> list[Picture]:
    """Every picture in `folder` (not below it), sorted by name, each decoded once.

    Args:
        folder: holds pictures, and captions in `.txt` files of the same names (UTF-8).
        caption: for pictures without a `.txt`.

    Returns:
        The pictures; at least one.

    Raises:
        DatasetError: the folder is missing or has no pictures, or some cannot be read or have no
            caption: all of them are named.
    """
    folder = Path(folder)
    if not folder.exists():
        raise DatasetError(f"dataset: there is no folder {folder}")
    if not folder.is_dir():
        raise DatasetError(f"dataset: {folder} is a file, expected a folder of pictures")
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not paths:
        raise DatasetError(
            f"dataset: {folder} holds no pictures; expected files ending in {', '.join(sorted(SUFFIXES))}"
        )
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda path: _check(path, caption), paths))
    problems = [result for result in results if isinstance(result, str)]
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DatasetError(
            f"dataset: {len(problems)} of {len(paths)} pictures in {folder} cannot be used:\n  {shown}{more}"
        )
    return [result for result in results if isinstance(result, Picture)]


def _check(path: Path, default: str | None) -> Picture | str:
    """The picture, or what is wrong with it."""
    try:
        height, width = read_pixels(path).shape[:2]
    except DatasetError as error:
        return str(error)
    text = path.with_suffix(".txt")
    try:
        caption = text.read_text(encoding="utf-8-sig").strip() if text.is_file() else default
    except (OSError, UnicodeDecodeError) as error:
        return f"{text}: the caption cannot be read: {error}"
    if caption is None:
        return f"{path}: has no caption; write {text.name} beside it, or give one for all with --caption"
    return Picture(path, caption, width, height)


def read_pixels(path: Path) -> npt.NDArray[np.uint8]:
    """The picture upright (EXIF), as RGB over white; shape (height, width, 3).

    Raises:
        DatasetError: the file cannot be decoded.
    """
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode in {"RGBA", "LA", "PA"} or "transparency" in upright.info:
                upright = upright.convert("RGBA")
                paper = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(paper, upright)
            return np.asarray(upright.convert("RGB"), dtype=np.uint8)
    except Image.DecompressionBombError as error:
        raise DatasetError(f"{path}: is too large to be decoded safely: {error}") from error
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise DatasetError(f"{path}: cannot be decoded: {error}") from error
