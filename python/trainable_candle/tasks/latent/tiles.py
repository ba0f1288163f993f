"""Decides which images the autoencoder processes in tiles, and how large the tiles are."""

from __future__ import annotations

from typing import Final

WHOLE: Final = 1280 * 1280
"""The most pixels of an image that is not divided; crops of about 1024 x 1024 px have fewer."""
TILE: Final = 1024
"""The width and the height of the tiles of larger images, px."""


def tile_size(width: int, height: int) -> int | None:
    """Return the side of the autoencoder's tiles for an image, px; None: do not divide it."""
    return None if width * height <= WHOLE else TILE


def area_at_once(area: int) -> int:
    """Return how many pixels of an image of `area` pixels the autoencoder processes at once."""
    return area if area <= WHOLE else TILE**2
