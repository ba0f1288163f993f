"""Masks: images that are white where the loss counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data.pixels import SUFFIXES, Facts, probe

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "masks"
"""The name of a folder of masks beside the images."""
SUFFIX: Final = "-masklabel"
"""The end of the name, before `.png`, of a mask beside its image."""
_SAME_SHAPE: Final = 0.02
"""The greatest accepted relative difference between the aspect ratios of an image and its mask.
Small differences come from rounding the mask's width and height to whole pixels."""


def is_mask(path: Path) -> bool:
    """Return whether the name of an image marks it as the mask of another one."""
    return path.stem.endswith(SUFFIX)


def mask_of(picture: Path) -> Path | None:
    """Find an image's mask: `NAME-masklabel.png` beside it, or `masks/NAME` in any format."""
    beside = picture.with_name(f"{picture.stem}{SUFFIX}.png")
    folder = picture.parent / FOLDER
    inside = (folder / f"{picture.stem}{suffix}" for suffix in (picture.suffix, *SUFFIXES))
    return next((path for path in (beside, *inside) if path.is_file()), None)


def none_found(kind: str, picture: Path) -> str:
    """Return the end of a message that says that no image has a mask.

    Args:
        kind: the kind of the masks, `file` or `alpha`.
        picture: one of the images; the message says how its mask would be named.
    """
    if kind == "alpha":
        return "has no effect: no image has transparency"
    names = f"{FOLDER}/{picture.name} or {picture.stem}{SUFFIX}.png"
    return f"has no effect: no image has a mask file, such as {names} for {picture}"


def mask_problem(mask: Path, picture: Facts) -> str | None:
    """Return why a mask does not fit an image; None if it fits.

    The two must have the same aspect ratio, but may have different sizes.

    Raises:
        DatasetError: the mask cannot be decoded.
    """
    facts = probe(mask)
    ratio = facts.width * picture.height / (facts.height * picture.width)
    if abs(ratio - 1) <= _SAME_SHAPE:
        return None
    return (
        f"{mask}: is {facts.width}x{facts.height} pixels, expected the aspect ratio of its image, "
        f"{picture.width}x{picture.height}"
    )
