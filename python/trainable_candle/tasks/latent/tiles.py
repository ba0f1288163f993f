"""Decides which images the autoencoder processes whole, and which in tiles."""

from __future__ import annotations

from typing import Final

WHOLE: Final = 1280 * 1280
"""The most pixels of an image that is processed whole; crops of about 1024 x 1024 px have fewer."""
TILE: Final = 1024
"""Width and height of the tiles of larger images, px."""


def tile_size(width: int, height: int) -> int | None:
    """Return the autoencoder's `tile_size`, px, for an image; None: process it whole."""
    return None if width * height <= WHOLE else TILE


def area_at_once(area: int) -> int:
    """Return how many of the `area` pixels of an image the autoencoder processes at once."""
    return area if area <= WHOLE else TILE**2
