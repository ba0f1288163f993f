"""Masks: images that are white where the loss counts, and black where it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data.pixels import SUFFIXES, Facts, probe

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "masks"
"""The name of a folder of masks beside the images."""
SUFFIX: Final = "-masklabel"
"""The end of the name, before `.png`, of a mask beside its image."""
_RATIO_TOLERANCE: Final = 0.02
"""The greatest accepted relative difference between the aspect ratios of an image and its mask.
Small differences come from rounding the mask's width and height to whole pixels."""


def is_mask(path: Path) -> bool:
    """Return whether the name of an image marks it as the mask of another image."""
    return path.stem.endswith(SUFFIX)


def mask_of(image: Path) -> Path | None:
    """Return the path of the mask of an image `NAME.EXTENSION`; None if there is no such file.

    It is `NAME-masklabel.png` beside the image, else `masks/NAME` with the extension of the image
    or any other extension of images.
    """
    beside = image.with_name(f"{image.stem}{SUFFIX}.png")
    folder = image.parent / FOLDER
    inside = (folder / f"{image.stem}{suffix}" for suffix in (image.suffix, *SUFFIXES))
    return next((path for path in (beside, *inside) if path.is_file()), None)


def none_found(kind: str, image: Path) -> str:
    """Return the end of a message that says that no image of a folder has a mask.

    The message begins with the setting that has no effect.

    Args:
        kind: the kind of the masks, `file` or `alpha`.
        image: one of the images; the message gives names that its mask file may have.
    """
    if kind == "alpha":
        return "has no effect: no image has transparency"
    names = f"{FOLDER}/{image.name} or {image.stem}{SUFFIX}.png"
    return f"has no effect: no image has a mask file, such as {names} for {image}"


def mask_problem(mask: Path, image: Facts) -> str | None:
    """Return what is wrong with the size of an image's mask; None if it fits.

    The mask and the image must have nearly the same aspect ratio, but may have different sizes.

    Raises:
        DatasetError: the mask cannot be decoded.
    """
    mask_facts = probe(mask)
    ratio = mask_facts.width * image.height / (mask_facts.height * image.width)
    if abs(ratio - 1) <= _RATIO_TOLERANCE:
        return None
    return (
        f"{mask}: is {mask_facts.width}x{mask_facts.height} pixels, expected the aspect ratio of "
        f"its image, {image.width}x{image.height}"
    )
