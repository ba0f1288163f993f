"""Sizes of buckets, the bucket of an image, and the crop that SDXL gets as a condition."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainable_candle.data import Bucket, Buckets, DatasetOptions, Fit, Source


def buckets(**settings: Any) -> Buckets:
    return Buckets(DatasetOptions((Source(Path("x")),), **settings))


def test_buckets_include_sizes_that_sdxl_was_trained_on() -> None:
    # Sizes (height, width) from the table in the SDXL report (arXiv 2307.01952, appendix I). The
    # assertion adds the transposed sizes.
    listed = [
        (512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664),
        (640, 1600), (640, 1536), (704, 1472), (704, 1408), (768, 1344), (832, 1216),
        (896, 1152), (1024, 1024),
    ]  # fmt: skip
    found = {(size.height, size.width) for size in buckets().full}
    assert {*listed, *((w, h) for h, w in listed)} <= found


@pytest.mark.parametrize(
    "settings",
    [{}, {"resolution": 512}, {"resolution": 64, "bucket_step": 8}, {"bucket_step": 32},
     {"resolution": 768, "min_side": 600, "max_side": 900}],
)  # fmt: skip
def test_every_bucket_has_allowed_sides_and_area(settings: dict[str, Any]) -> None:
    options = DatasetOptions((Source(Path("x")),), **settings)
    full = Buckets(options).full
    assert Bucket(options.resolution, options.resolution) in full
    for size in full:
        assert size.width * size.height <= options.resolution**2
        for side in (size.width, size.height):
            assert side % options.bucket_step == 0
            assert (options.min_side or 0) <= side <= (options.max_side or 2 * options.resolution)
        assert Bucket(size.height, size.width) in full


IMAGE_SIZES = list(
    itertools.product([130, 255, 256, 300, 511, 640, 1000, 1023, 1024, 2000, 7000], repeat=2)
)


@pytest.mark.parametrize("upscale", [False, True])
def test_a_scaled_image_covers_its_bucket_and_loses_little(upscale: bool) -> None:
    choice = buckets(upscale=upscale)
    for width, height in IMAGE_SIZES:
        fit = choice.fit(width, height)
        if fit is None:  # no bucket is small enough for the image
            assert not upscale
            # The shortest side of a bucket is 256 px.
            assert min(width, height) < 256
            continue
        wide, high = fit.scaled
        assert wide >= fit.bucket.width
        assert high >= fit.bucket.height
        assert wide == fit.bucket.width or high == fit.bucket.height
        # Width and height are scaled by the same factor, except for rounding to whole pixels.
        assert abs(wide / width - high / height) <= 0.5 / min(width, height) + 1e-9
        if not upscale:
            assert wide <= width
            assert high <= height
        # The aspect ratios of buckets go up to 4 (2048 x 512), so such images lose little.
        if max(width, height) <= 4 * min(width, height):
            assert fit.lost < 0.25


def test_small_images_get_small_buckets() -> None:
    # All sizes are width, height.
    assert str(buckets().fit(1000, 1000).bucket) == "960x960"
    assert str(buckets().fit(700, 300).bucket) == "640x256"
    assert str(buckets(resolution=64, bucket_step=16).fit(50, 70).bucket) == "48x64"


def test_small_images_can_be_enlarged() -> None:
    assert str(buckets(upscale=True).fit(1000, 1000).bucket) == "1024x1024"


def test_without_bucketing_the_square_is_the_only_bucket() -> None:
    assert buckets(bucketing=False).fit(1000, 1030) is None  # the width is below 1024
    assert str(buckets(bucketing=False).fit(3000, 1030).bucket) == "1024x1024"


def test_the_frame_of_a_mirrored_crop_gives_its_place_in_the_mirrored_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 120, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    # The image is not scaled.
    fit = Fit(Bucket(width=100, height=48), original=(120, 50), scaled=(120, 50))
    for left, top in [(0, 0), (3, 1), (20, 2)]:
        np.testing.assert_array_equal(
            fit.cut(image, left, top), pixels[top : top + 48, left : left + 100]
        )
        frame = fit.frame(left, top, flipped=True)
        assert (frame.original, frame.bucket) == ((120, 50), fit.bucket)
        mirrored = pixels[:, ::-1][frame.top : frame.top + 48, frame.left : frame.left + 100]
        np.testing.assert_array_equal(fit.cut(image, left, top, flipped=True), mirrored)


def test_crops_are_taken_from_the_scaled_image() -> None:
    ramp = np.tile(np.linspace(0, 255, 400), (200, 1)).astype(np.uint8)
    fit = buckets(resolution=64, bucket_step=16).fit(400, 200)
    assert (str(fit.bucket), fit.scaled) == ("80x48", (96, 48))
    # `corner` gives the left and the top of the centred crop.
    crop = np.asarray(fit.cut(Image.fromarray(ramp), *fit.corner()))
    assert crop.shape == (48, 80)
    # The crop leaves out 8 of 96 columns on each side. The centre of column n is at n + 0.5.
    assert abs(float(crop[24, 0]) - 255 * 8.5 / 96) < 2
    assert abs(float(crop[24, -1]) - 255 * 87.5 / 96) < 2
