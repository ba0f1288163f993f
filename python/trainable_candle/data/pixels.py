"""Reads image files: upright RGB images, alpha channels, and their properties."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

SUFFIXES: Final = (
    ".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp",
)  # fmt: skip
_ORIENTATION: Final = 0x0112
"""The EXIF tag of the image's orientation."""
_ON_ITS_SIDE: Final = range(5, 9)
"""EXIF orientations for which the upright image has width and height exchanged."""
_WORKERS: Final = min(8, os.cpu_count() or 1)
"""The number of threads of `in_parallel`."""
AHEAD: Final = 2 * _WORKERS
"""The most results that `in_parallel` computes ahead."""
# What Pillow's decoders are known to raise for damaged files.
_UNDECODABLE: Final = (
    OSError, ValueError, SyntaxError, MemoryError, ArithmeticError, LookupError, RuntimeError,
    TypeError, struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The properties of an image file."""

    width: int
    """The width in pixels, after the rotation that EXIF prescribes."""
    height: int
    """The height in pixels, after this rotation."""
    digest: str
    """A hash of the file's bytes, 32 hexadecimal digits."""
    transparent: bool = False
    """Whether the image has an alpha channel, or a colour that stands for transparency."""


def probe(path: Path) -> Facts:
    """Return the properties of an image file; decodes the image to check it.

    The image is decoded at reduced size if its format allows that.

    Raises:
        DatasetError: the file is missing, cannot be decoded, or has pixels that are not integers of
            at most 16 bits.
    """
    with _decoding(path):
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                width, height = height, width
            transparent = _has_alpha(image)
            if image.mode[0] in "IF":  # more than 8 bits in a channel: "I", "I;16" and others, "F"
                _as_rgb(image)  # It raises an error if it cannot convert the pixels to 8 bits.
            else:
                image.draft(None, (1, 1))  # Selects the smallest size that the decoder offers.
                image.load()
    return Facts(width, height, _digest(data), transparent)


def read_rgb(path: Path, digest: str | None = None) -> Image.Image:
    """Read an image as RGB, rotated as EXIF prescribes and blended with white where transparent.

    Of an animation, the first frame is read. 16-bit values lose the lower byte. Colour profiles are
    not applied.

    Args:
        path: the image's file.
        digest: the file's digest from `probe`, to detect a change since then; None skips the check.

    Raises:
        DatasetError: the file is missing, cannot be decoded, has pixels that are not integers of at
            most 16 bits, or has changed.
    """
    with _decoding(path):
        data = path.read_bytes()
    if digest is not None and _digest(data) != digest:
        raise DatasetError(
            f"{path}: has changed since it was checked; leave the images alone during training"
        )
    with _decoding(path), Image.open(io.BytesIO(data)) as image:
        return _as_rgb(ImageOps.exif_transpose(image))


def read_pixels(path: Path) -> npt.NDArray[np.uint8]:
    """Return the image of `read_rgb` as an array; shape (height, width, 3).

    Raises:
        DatasetError: see `read_rgb`.
    """
    return np.asarray(read_rgb(path), dtype=np.uint8)


def read_grey(path: Path) -> Image.Image:
    """Return an image in 8-bit grey, upright and blended with white where transparent.

    Raises:
        DatasetError: see `read_rgb`.
    """
    return read_rgb(path).convert("L")


def read_alpha(path: Path) -> Image.Image:
    """Return the alpha channel of an image, upright, in 8 bits; 255 everywhere if it has none.

    Raises:
        DatasetError: the file is missing or cannot be decoded.
    """
    with _decoding(path), Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
        if _has_alpha(upright):
            return upright.convert("RGBA").getchannel("A")
        return Image.new("L", upright.size, 255)


def in_parallel(
    function: Callable[[Task], Outcome], tasks: Iterable[Task]
) -> Generator[Outcome, None, None]:
    """Yield the results of `function` in order; a few are computed ahead.

    At most `AHEAD` results wait for the caller, so the memory in use does not grow with the number
    of tasks. An error of `function` is raised in place of its result.
    """
    # Hide Pillow's warnings about large images and odd metadata, which are accepted here. For even
    # larger images, Pillow raises an error.
    with warnings.catch_warnings(), ThreadPoolExecutor(_WORKERS) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", module=r"PIL\.")
        waiting = iter(tasks)
        running = deque(pool.submit(function, task) for task in islice(waiting, AHEAD))
        try:
            while running:
                # A future keeps its result in memory: remove it from the queue before the yield.
                yield running.popleft().result()
                running.extend(pool.submit(function, task) for task in islice(waiting, 1))
        finally:
            for future in running:
                future.cancel()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Replace errors of reading and decoding an image by DatasetErrors that name the file."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DatasetError(
            f"{path}: is too large to be decoded safely: {str(error).rstrip('.')}; scale it down"
        ) from error
    except UnidentifiedImageError as error:
        raise DatasetError(
            f"{path}: cannot be decoded: its content is not an image in a known format"
        ) from error
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path}: has vanished; leave the images alone during training"
        ) from error
    except _UNDECODABLE as error:
        raise DatasetError(f"{path}: cannot be decoded: {error}") from error


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info


def _as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB, blended with white where transparent.

    Raises:
        ValueError: the pixels are not integers from 0 to 65535.
    """
    if image.mode.startswith("I"):
        # Pillow's own conversion clips values to 255 instead of scaling them.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError("its pixels are not all from 0 to 65535; save it with 8 or 16 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if _has_alpha(image):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
