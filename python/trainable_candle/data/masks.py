"""Masks: pictures of where the loss counts, white where it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data.pixels import SUFFIXES, Facts, probe

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "masks"
SUFFIX: Final = "-masklabel"
_SAME_SHAPE: Final = 0.02
"""How far the ratios of the sides may differ, relatively: from scaling to whole pixels."""


def is_mask(path: Path) -> bool:
    """Whether a picture is one of the masks that lie among pictures."""
    return path.stem.endswith(SUFFIX)


def mask_of(picture: Path) -> Path | None:
    """The mask of a picture: `masks/NAME` beside it in any format, or `NAME-masklabel.png`."""
    beside = picture.with_name(f"{picture.stem}{SUFFIX}.png")
    folder = picture.parent / FOLDER
    inside = (folder / f"{picture.stem}{suffix}" for suffix in (picture.suffix, *SUFFIXES))
    return next((path for path in (beside, *inside) if path.is_file()), None)


def mask_problem(mask: Path, picture: Facts) -> str | None:
    """Why a mask does not fit a picture; another size does, another shape does not.

    Raises:
        DatasetError: the mask cannot be decoded.
    """
    facts = probe(mask)
    ratio = facts.width * picture.height / (facts.height * picture.width)
    if abs(ratio - 1) <= _SAME_SHAPE:
        return None
    return (
        f"{mask}: is {facts.width}x{facts.height} pixels, expected the shape of its picture, "
        f"{picture.width}x{picture.height}"
    )
