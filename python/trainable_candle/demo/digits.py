"""Handwritten digits: the demo trains a LoRA on some of them, and fits its judge to others.

The base is the small model under the LoRA. The judge is a classifier: it says which digit a drawing
of the model shows.

There are 1797 images of 8x8 pixels. They show the digits 0 to 9, written by 13 people, and are the
test part of the UCI data set "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
1998; CC BY 4.0, see ``assets/digits.LICENSE.txt``). The wheel has a copy, so that the demo runs
offline.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Images, shape (n, 8, 8), values 0 (paper) to 16 (ink)."""

Labels: TypeAlias = npt.NDArray[np.uint8]
"""The digit of each image, shape (n,), values 0 to 9."""

CLASSES: Final = 10
SIDE: Final = 8
MAX_PIXEL: Final = 16

HELD_OUT: Final = 0.3
"""The share of each digit's images that neither the base nor a LoRA is trained on."""
SPLIT_SEED: Final = 0

UNSEEN: Final = 0
"""The digit that the base in the package was not trained on.

Zero can be judged best: no mixture of other digits has its empty middle, so the base without a LoRA
draws no accidental zeros, and the judge takes no other drawing for a zero.
"""


@dataclass(frozen=True)
class Digits:
    """Images, and the digit that each of them shows, in the same order."""

    pixels: Pixels
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, *digits: int) -> Digits:
        """Return the images of the given digits."""
        return self.where(np.isin(self.labels, digits))

    def without(self, *digits: int) -> Digits:
        """Return the images of all other digits."""
        return self.where(~np.isin(self.labels, digits))

    def where(self, mask: npt.NDArray[np.bool_]) -> Digits:
        """Return the images for which ``mask``, shape (n,), is true."""
        return Digits(self.pixels[mask], self.labels[mask])


def load() -> Digits:
    """Return all 1797 images, in the order of the data set."""
    resource = files("trainable_candle.demo") / "assets" / "digits.npz"
    with resource.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return Digits(arrays["pixels"], arrays["labels"])


def split(
    digits: Digits, held_out: float = HELD_OUT, seed: int = SPLIT_SEED
) -> tuple[Digits, Digits]:
    """Split images at random into a training and a held-out part, stratified by digit.

    The generator is numpy's legacy `RandomState`, whose numbers never change, so a seed gives the
    same split with every version of numpy.

    Args:
        digits: the images to split.
        held_out: the share of each digit's images that is held out, between 0 and 1, both excluded.
        seed: 0 to 2**32 - 1. The base in the wheel was trained on the split of the default seed.

    Returns:
        The training part and the held-out part, each in the order of ``digits``.

    Raises:
        ValueError: ``held_out`` is not between 0 and 1.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"split: held_out is {held_out}, expected a share between 0 and 1")
    generator = np.random.RandomState(seed)
    is_held_out = np.zeros(len(digits), dtype=np.bool_)
    for digit in range(CLASSES):
        members = np.flatnonzero(digits.labels == digit)
        count = round(held_out * len(members))
        is_held_out[generator.permutation(members)[:count]] = True
    return digits.where(~is_held_out), digits.where(is_held_out)


def to_grey(pixels: Pixels) -> npt.NDArray[np.uint8]:
    """Convert pixels to the greys of an image file: 0 (paper) becomes 255, 16 (ink) becomes 0."""
    grey: npt.NDArray[np.uint8] = 255 - np.rint(pixels * (255 / MAX_PIXEL)).astype(np.uint8)
    return grey


def from_grey(grey: npt.NDArray[np.uint8]) -> Pixels:
    """Convert greys to pixels, the inverse of `to_grey`; each becomes the nearest of 17 levels."""
    pixels: Pixels = np.rint((255 - grey) * (MAX_PIXEL / 255)).astype(np.uint8)
    return pixels
