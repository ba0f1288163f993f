"""Which images the autoencoder takes whole, and which in tiles."""

from __future__ import annotations

from typing import Final

WHOLE: Final = 1280 * 1280
"""The most pixels of an image that is taken whole; buckets of 1024 x 1024 px are smaller."""
TILE: Final = 1024
"""Side of the tiles of larger ones, px."""


def tile_size(width: int, height: int) -> int | None:
    """The `tile_size` for an image of this size, px; None encodes it whole."""
    return None if width * height <= WHOLE else TILE


def area_at_once(area: int) -> int:
    """The pixels that it takes at a time of an image of `area` pixels."""
    return area if area <= WHOLE else TILE**2
