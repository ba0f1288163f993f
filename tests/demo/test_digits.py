"""The package's digits equal scikit-learn's; the split holds out the same share of each digit."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from trainable_candle.demo import digits


def test_shipped_digits_are_the_uci_digits() -> None:
    shipped, reference = digits.load(), load_digits()
    assert shipped.pixels.dtype == np.uint8
    np.testing.assert_array_equal(shipped.pixels, reference.images)
    np.testing.assert_array_equal(shipped.labels, reference.target)


def test_split_is_stratified_and_loses_nothing() -> None:
    everything = digits.load()
    train, held_out = digits.split(everything)
    images = np.concatenate([train.pixels, held_out.pixels]).reshape(-1, 64)
    expected = everything.pixels.reshape(-1, 64)
    # The same images in any order.
    np.testing.assert_array_equal(images[np.lexsort(images.T)], expected[np.lexsort(expected.T)])
    for digit in range(digits.CLASSES):
        share = len(held_out.only(digit)) / len(everything.only(digit))
        assert share == pytest.approx(digits.HELD_OUT, abs=0.01)


def test_split_follows_from_the_seed() -> None:
    everything = digits.load()
    first, again, other_seed = (digits.split(everything, seed=seed)[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.pixels, again.pixels)
    assert not np.array_equal(first.pixels, other_seed.pixels)


def test_only_and_without_are_complements() -> None:
    everything = digits.load()
    assert set(everything.only(3, 7).labels) == {3, 7}
    assert set(everything.without(3, 7).labels) == {0, 1, 2, 4, 5, 6, 8, 9}
    assert len(everything.only(3, 7)) + len(everything.without(3, 7)) == len(everything)


@pytest.mark.parametrize("held_out", [0.0, 1.0, -0.1, float("nan")])
def test_split_rejects_an_impossible_share(held_out: float) -> None:
    with pytest.raises(ValueError, match="split: held_out is"):
        digits.split(digits.load(), held_out=held_out)


def test_conversion_to_an_image_and_back_keeps_pixels() -> None:
    pixels = digits.load().pixels
    grey = digits.to_grey(pixels)
    assert (grey.min(), grey.max()) == (0, 255)
    np.testing.assert_array_equal(digits.from_grey(grey), pixels)


def test_grey_values_are_rounded_to_the_nearest_level() -> None:
    grey = np.arange(256, dtype=np.uint8)
    pixels = digits.from_grey(grey)
    # The 17 levels are about 16 greys apart.
    assert np.abs(digits.to_grey(pixels).astype(int) - grey).max() <= 8
    # Black is ink, 16; white is paper, 0.
    assert (pixels[0], pixels[255]) == (16, 0)
