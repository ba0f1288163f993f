"""Hearts and other shapes, and a judge that tells them apart.

The judge is a support vector machine of scikit-learn. It is fitted on shapes that this module draws
with seeds other than that of the training images, and has no access to the model that draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image, ImageDraw
from sklearn.svm import SVC

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

SIDE: Final = 128
"""Width and height of an image, px."""
HEART: Final = "heart"
SHAPES: Final = (HEART, "circle", "triangle", "cross", "ring")
COLOURS: Final = {
    "red": (200, 50, 45),
    "yellow": (225, 190, 50),
    "purple": (120, 60, 150),
    "white": (235, 235, 235),
    "orange": (230, 130, 40),
}
_SCALE: Final = 4
"""Shapes are drawn on a canvas with this many times the image's width and height. Reducing the
canvas to the image's size smooths edges."""
_EACH: Final = 40
"""The number of images of each shape that the judge is fitted on."""
_SEEN: Final = 16
"""Width and height of the judge's input, px."""


def draw(shape: str, colour: str, random: np.random.Generator) -> Image.Image:
    """Return a filled shape on a plain background of medium brightness.

    The place and the size of the shape and the colour of the background are random.
    """
    side = SIDE * _SCALE
    image = Image.new("RGB", (side, side), tuple(int(v) for v in random.integers(95, 135, 3)))
    canvas, fill = ImageDraw.Draw(image), COLOURS[colour]
    # The centre of the shape, and about half its width, in pixels of the canvas.
    x, y = side / 2 + random.uniform(-0.03, 0.03, 2) * side
    r = side * random.uniform(0.3, 0.34)
    if shape == HEART:
        # The curve reaches from -16 to 16 across, and from -12 to 17 down.
        t = np.linspace(0, 2 * np.pi, 200)
        across = 16 * np.sin(t) ** 3
        down = np.cos(4 * t) + 2 * np.cos(3 * t) + 5 * np.cos(2 * t) - 13 * np.cos(t)
        canvas.polygon(
            [(x + a * r / 15, y + d * r / 15) for a, d in zip(across, down, strict=True)], fill
        )
    elif shape == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], fill)
    elif shape == "cross":
        # Half the width and height of each bar, as multiples of r.
        for wide, high in ((0.32, 1.1), (1.1, 0.32)):
            canvas.rectangle((x - wide * r, y - high * r, x + wide * r, y + high * r), fill)
    else:  # A circle or a ring.
        canvas.ellipse((x - r, y - r, x + r, y + r), fill)
        if shape == "ring":
            r *= 0.6
            background = image.getpixel((0, 0))
            canvas.ellipse((x - r, y - r, x + r, y + r), background)
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


class Judge:
    """A classifier of shapes (SVM, radial basis functions, C = 10), blind to colour."""

    def __init__(self, seed: int) -> None:
        self._classifier = SVC(C=10.0, kernel="rbf", gamma="scale")
        images, labels = _examples(np.random.default_rng([seed, 1]))
        self._classifier.fit(_features(images), labels)
        tests, expected = _examples(np.random.default_rng([seed, 2]))
        self.accuracy = float(np.mean(self._classifier.predict(_features(tests)) == expected))
        """The share (0 to 1) of right answers about shapes that the judge was not fitted on."""

    def hearts(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return whether each of n images is a heart; their shape is (n, height, width, 3)."""
        found: npt.NDArray[np.bool_] = self._classifier.predict(_features(images)) == HEART
        return found


def is_colour(image: npt.NDArray[np.uint8], colour: str) -> bool:
    """Return whether `colour` is the one of `COLOURS` nearest to the mean of an image's middle.

    The image has the shape (height, width, 3). Its middle is a rectangle of a quarter of its height
    and a quarter of its width. Of a ring, the function sees little but the background inside.
    """
    rows, columns = (size // 8 for size in image.shape[:2])  # An eighth of height and width.
    middle = image[3 * rows : 5 * rows, 3 * columns : 5 * columns].mean((0, 1))
    distances = {name: np.linalg.norm(middle - rgb) for name, rgb in COLOURS.items()}
    return min(distances, key=lambda name: distances[name]) == colour


def _examples(random: np.random.Generator) -> tuple[npt.NDArray[np.uint8], list[str]]:
    """Draw `_EACH` images of each shape in random colours; returns the images and their shapes."""
    labels = list(SHAPES) * _EACH
    colours = random.choice(list(COLOURS), len(labels))
    images = [np.asarray(draw(s, str(c), random)) for s, c in zip(labels, colours, strict=True)]
    return np.stack(images), labels


def _features(
    images: Sequence[npt.NDArray[np.uint8]] | npt.NDArray[np.uint8],
) -> npt.NDArray[np.float64]:
    """Return one row of features for each image.

    The image is reduced to `_SEEN` x `_SEEN` grey values. The features are the absolute differences
    between these values and that of the background (the median of the values at the edges), divided
    by the norm of all differences. So the judge sees neither the contrast nor whether a shape is
    lighter or darker than its background.
    """
    rows = []
    for image in images:
        grey = Image.fromarray(image).convert("L").resize((_SEEN, _SEEN), Image.Resampling.BOX)
        values = np.asarray(grey, dtype=np.float64).ravel()
        edge = np.concatenate(
            [values[:_SEEN], values[-_SEEN:], values[::_SEEN], values[_SEEN - 1 :: _SEEN]]
        )
        values = np.abs(values - np.median(edge))
        rows.append(values / (np.linalg.norm(values) + 1e-6))
    return np.stack(rows)
