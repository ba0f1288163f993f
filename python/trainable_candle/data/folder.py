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

SUFFIXES: Final = (
    ".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp",
)  # fmt: skip
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
        folder: holds pictures, and captions in `.txt` files of the same names (UTF-8). Hidden files
            are left out.
        caption: for pictures without a `.txt`.

    Returns:
        The pictures; at least one.

    Raises:
        DatasetError: the folder is missing or has no pictures, or some cannot be read or have no
            caption: the first ten are named.
        OSError: the folder cannot be listed.
    """
    folder = Path(folder).expanduser()
    if not folder.exists():
        raise DatasetError(f"dataset: there is no folder {folder}")
    if not folder.is_dir():
        raise DatasetError(f"dataset: {folder} is a file, expected a folder of pictures")
    paths = sorted(path for path in folder.iterdir() if _is_picture(path))
    if not paths:
        raise DatasetError(
            f"dataset: {folder} holds no pictures; expected files ending in {', '.join(SUFFIXES)} "
            "(folders inside it are not read)"
        )
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda path: _check(path, caption), paths))
    problems = [result for result in results if isinstance(result, str)]
    if problems:
        raise unusable(folder, len(paths), problems)
    return [result for result in results if isinstance(result, Picture)]


def unusable(folder: Path, count: int, problems: list[str]) -> DatasetError:
    """What to say when `problems` were found among `count` pictures: the first ten."""
    lines = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return DatasetError(
        f"dataset: {len(problems)} of {count} pictures in {folder} cannot be used:\n  "
        + "\n  ".join(lines)
    )


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


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
        return f"{path}: no caption; write {text.name} beside it, or give --caption for all such"
    return Picture(path, caption, width, height)


def read_pixels(path: Path) -> npt.NDArray[np.uint8]:
    """The picture upright (EXIF), as RGB over white; shape (height, width, 3).

    Of an animation it is the first frame; 16-bit grey loses its lower byte.

    Raises:
        DatasetError: the file cannot be decoded, or holds no picture in whole numbers.
    """
    try:
        with Image.open(path) as image:
            return np.asarray(_as_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except Image.DecompressionBombError as error:
        raise DatasetError(f"{path}: is too large to be decoded safely: {error}") from error
    except (OSError, ValueError, SyntaxError, MemoryError) as error:
        raise DatasetError(f"{path}: cannot be decoded: {error}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips these to 255 where it should scale them.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels have more than 16 bits; save it with 8 or 16")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
