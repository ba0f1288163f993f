"""The autoencoder encodes an image whole or in tiles.

It encodes an image whole if its area is at most 1280 * 1280 pixels, whatever the shape.
"""

import pytest

from trainable_candle.tasks.latent.tiles import TILE, area_at_once, tile_size


@pytest.mark.parametrize(
    ("width", "height"), [(1024, 1024), (1280, 960), (512, 2048), (1280, 1280)]
)
def test_images_of_usual_buckets_are_encoded_whole(width: int, height: int) -> None:
    assert tile_size(width, height) is None
    assert area_at_once(width * height) == width * height


@pytest.mark.parametrize(("width", "height"), [(1536, 1536), (2048, 1024)])
def test_larger_images_are_encoded_in_tiles(width: int, height: int) -> None:
    assert tile_size(width, height) == TILE
    assert area_at_once(width * height) == TILE**2
