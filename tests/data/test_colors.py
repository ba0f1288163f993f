"""Colour augmentation: how pixels change, which pixels stay white, how changes are drawn."""

import colorsys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageEnhance

from trainable_candle.data import ColorOptions, Dataset, DatasetOptions, load_dataset, parse_sources
from trainable_candle.data.colors import Colors
from trainable_candle.errors import ConfigError

MakeImages = Callable[..., list[Path]]
Pixels = npt.NDArray[np.uint8]
UNCHANGED = Colors(brightness=1, contrast=1, saturation=1, hue=0)
ALL = ColorOptions(brightness=0.5, contrast=0.4, saturation=0.3, hue=0.2, variants=3)


@pytest.fixture
def image() -> Pixels:
    """Noise, every corner of the RGB cube, and three more colours."""
    pixels = np.random.default_rng(3).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    pixels[0, :8] = [[255 * (n >> c & 1) for c in range(3)] for n in range(8)]
    pixels[1, :3] = [[90, 90, 90], [200, 200, 10], [7, 30, 30]]
    return pixels


def luma(pixel: npt.NDArray[Any]) -> float:
    return float(0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2])


def by_definition(colors: Colors, pixels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the changed pixels (0 to 255), computed from the definition in f64, pixel by pixel."""
    x = np.clip(pixels.astype(np.float64) * colors.brightness, 0, 255)
    mean = np.mean([luma(pixel) for pixel in x.reshape(-1, 3)])
    x = np.clip(mean + (x - mean) * colors.contrast, 0, 255)
    for pixel in x.reshape(-1, 3):
        grey = luma(pixel)
        pixel[:] = np.clip(grey + (pixel - grey) * colors.saturation, 0, 255)
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        pixel[:] = colorsys.hsv_to_rgb((hue + colors.hue) % 1, saturation, value)
    return x


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"brightness": 0.6}, {"brightness": 1.7},
        {"contrast": 0.0}, {"contrast": 0.4}, {"contrast": 1.6},
        {"saturation": 0.0}, {"saturation": 0.5}, {"saturation": 2.0},
        {"hue": 0.5}, {"hue": -0.5}, {"hue": 1 / 3}, {"hue": -0.04},
        {"brightness": 1.3, "contrast": 0.7, "saturation": 1.4, "hue": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_pixels_follow_the_definition(image: Pixels, changes: dict[str, float]) -> None:
    colors = replace(UNCHANGED, **changes)
    found = colors.apply(image)
    assert found.dtype == np.uint8
    assert found.shape == image.shape
    # Rounding to whole levels errs by up to half a level; 1e-3 allows for f32.
    assert np.abs(found - by_definition(colors, image)).max() < 0.5 + 1e-3
    np.testing.assert_array_equal(UNCHANGED.apply(image), image)


@pytest.mark.parametrize("factor", [0.5, 1.4])
def test_pixels_equal_those_of_pillow(image: Pixels, factor: float) -> None:
    for name, enhancer in (
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ):
        expected = np.asarray(enhancer(Image.fromarray(image)).enhance(factor), np.int64)
        # Pillow also rounds the grey value, and it rounds its results down.
        found = replace(UNCHANGED, **{name: factor}).apply(image)
        assert np.abs(found - expected).max() <= 1, name


def test_white_behind_transparent_pixels_stays_white(image: Pixels) -> None:
    colors = Colors(brightness=0.5, contrast=1.5, saturation=0.7, hue=0.2)
    opaque = np.full(image.shape[:2], 255, np.uint8)
    np.testing.assert_array_equal(colors.apply(image, opaque), colors.apply(image))
    white = np.full_like(image, 255)
    transparent = np.zeros_like(opaque)
    np.testing.assert_array_equal(colors.apply(white, transparent), white)
    # The left half is opaque, the right half transparent: the contrast changes around the mean of
    # the left half.
    left_opaque = opaque.copy()
    left_opaque[:, 8:] = 0
    on_white = np.where(left_opaque[..., None] > 0, image, 255).astype(np.uint8)
    found = colors.apply(on_white, left_opaque)
    np.testing.assert_array_equal(found[:, :8], colors.apply(image[:, :8]))
    assert (found[:, 8:] == 255).all()
    # At half opacity, the colour of the pixels changes, but not the white behind them: half the
    # brightness makes (90, 30, 10) of (180, 60, 20).
    composite = Image.alpha_composite(
        Image.new("RGBA", (4, 4), "white"), Image.new("RGBA", (4, 4), (180, 60, 20, 128))
    )
    colors = replace(UNCHANGED, brightness=0.5)
    found = colors.apply(np.asarray(composite.convert("RGB")), np.full((4, 4), 128, np.uint8))
    expected = 255 + (np.array([90, 30, 10]) - 255) * 128 / 255
    assert np.abs(found - expected).max() <= 1


def load(*entries: Any, seed: int = 0, **settings: Any) -> Dataset:
    settings = {"resolution": 64, "bucket_step": 16, "color": ALL, **settings}
    options = DatasetOptions(parse_sources(entries), **settings)
    return load_dataset(options, captions=None, seed=seed)


def test_variants_are_drawn_uniformly_for_each_seed_and_image(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", *[(64, 64)] * 40)  # Writes 40 images of 64x64 pixels into the folder `a`.
    data = load(tmp_path / "a", flip=True)
    views = data.views()
    # Each image has three variants of its colours, and is mirrored or not.
    assert len(views) == 40 * 3 * 2
    # 900 batches of two views.
    drawn = [view for i in range(900) for view in data.batches(2).batch(i).views]
    assert set(drawn) == set(views)
    # Each of the 120 variants is expected 15 times. The most frequent variant must exceed 15 by
    # less than six standard deviations.
    counts = Counter(view.colors for view in drawn)
    assert len(counts) == 40 * 3
    assert max(counts.values()) < 15 + 6 * 15**0.5
    # Half of the 1800 views are mirrored; again the bound is six standard deviations.
    mirrored = Counter(view.flipped for view in drawn)
    assert abs(mirrored[True] - 900) < 6 * 450**0.5
    # Brightness, contrast, saturation and hue change uniformly within the limits of `ALL`. So the
    # mean of 120 changes has the standard deviation limit / sqrt(3 * 120).
    changes = np.array([list(vars(colors).values()) for colors in counts]) - [1, 1, 1, 0]
    limits = np.array([0.5, 0.4, 0.3, 0.2])
    assert (np.abs(changes) <= limits).all()
    assert (np.abs(changes).max(axis=0) > 0.9 * limits).all()
    assert (np.abs(changes.mean(axis=0)) < 6 * limits / (3 * 120) ** 0.5).all()
    again, other_seed = load(tmp_path / "a", flip=True), load(tmp_path / "a", flip=True, seed=1)
    for index in range(50):
        batch = data.batches(2).batch(index)
        assert again.batches(2).batch(index).views == batch.views
    assert not {view.colors for view in other_seed.views()} & set(counts)


def test_the_order_and_mirroring_of_images_do_not_depend_on_colours(
    images: MakeImages, tmp_path: Path
) -> None:
    images("a", *[(64, 64)] * 40)
    data = load(tmp_path / "a", flip=True)
    plain = load(tmp_path / "a", flip=True, color=ColorOptions())
    for index in range(50):
        views_of = [
            [(v.item, v.flipped) for v in d.batches(2).batch(index).views] for d in (data, plain)
        ]
        assert views_of[0] == views_of[1]
    assert all(view.colors is None for view in plain.views())


def test_colours_change_opaque_pixels_but_not_the_mask(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rgba = rng.integers(0, 256, (64, 64, 4), dtype=np.uint8)
    rgba[:32, :, 3], rgba[32:, :, 3] = 0, 255
    (tmp_path / "a").mkdir()
    Image.fromarray(rgba).save(tmp_path / "a" / "x.png")
    (tmp_path / "a" / "x.txt").write_text("x")
    data, plain = (
        load(tmp_path / "a", mask="alpha", color=color) for color in (ALL, ColorOptions())
    )
    original = plain.pixels(plain.views()[0])
    for index in range(4):
        batch = data.batches(1).batch(index)
        (view,) = batch.views
        assert view.colors is not None
        found = data.pixels(view)
        assert (found[:32] == 255).all()
        np.testing.assert_array_equal(found[32:], view.colors.apply(original[32:]))
        masks = [d.masks(b) for d, b in ((data, batch), (plain, plain.batches(1).batch(index)))]
        assert masks[0] is not None
        np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"brightness": 1.1}, "color brightness is 1.1, expected .* of at most 1"),
        ({"saturation": -0.1}, "color saturation is -0.1"),
        ({"hue": 0.6}, r"color hue is 0.6, expected .* of at most 0\.5"),
        ({"variants": 0}, "color variants is 0"),
    ],
)
def test_impossible_strengths_are_rejected(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ColorOptions(**settings)
