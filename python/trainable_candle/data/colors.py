"""Random changes of an image's colours, as by torchvision's `ColorJitter`.

`ColorJitter` shuffles the order of the changes; here, their order is always the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from trainable_candle.draws import generator, pair

if TYPE_CHECKING:
    import numpy.typing as npt

    from trainable_candle.data.options import ColorOptions

    Planes = npt.NDArray[np.float32]
    """Three channels, shape (3, height, width), or one value per pixel, shape (height, width)."""

_LUMA: Final = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue (ITU-R BT.601)."""
_WHITE: Final = np.float32(255)


@dataclass(frozen=True)
class Colors:
    """Changes of an image's colours, made in the order of the fields.

    After each change, the channels are clipped to the range from 0 to 255.
    """

    brightness: float
    """The factor by which all channels are multiplied."""
    contrast: float
    """The factor for the differences between the channels and the image's mean luma, in which each
    pixel has its opacity as weight."""
    saturation: float
    """The factor for the differences between a pixel's channels and its luma."""
    hue: float
    """What is added to the hue, as a fraction of the colour circle."""

    def apply(
        self, pixels: npt.NDArray[np.uint8], opacity: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """Return an image with these changes.

        Args:
            pixels: RGB values, blended with white where the image is transparent; shape
                (height, width, 3).
            opacity: the alpha channel, with shape (height, width); None for an opaque image. The
                blending with white is undone before the changes, and repeated after them.
        """
        planes = np.ascontiguousarray(np.moveaxis(pixels, -1, 0), np.float32)
        alpha = None
        if opacity is not None:
            alpha = opacity.astype(np.float32) / _WHITE
            # Undo the blending with white. Fully transparent pixels have no colour of their own,
            # and stay white. The maximum avoids a division by their opacity, 0.
            _stretch(planes, _WHITE, 1 / np.maximum(alpha, 1 / _WHITE))
        if self.brightness != 1:
            _stretch(planes, np.float32(0), np.float32(self.brightness))
        if self.contrast != 1:
            # `np.average` rejects weights that are all zero.
            weights = None if alpha is None or not alpha.any() else alpha
            mean = np.float32(np.average(_luma(planes), weights=weights))
            _stretch(planes, mean, np.float32(self.contrast))
        if self.saturation != 1:
            _stretch(planes, _luma(planes), np.float32(self.saturation))
        if self.hue:
            planes = _turned(planes, np.float32(6 * self.hue))
        if alpha is not None:
            _stretch(planes, _WHITE, alpha)
        return np.moveaxis(np.rint(planes).astype(np.uint8), 0, -1)


def drawn_colors(options: ColorOptions, seed: int, image_seed: int, variant: int) -> Colors | None:
    """Draw the colour changes of a variant of an image, each uniformly from its range.

    Args:
        options: how much each property may vary.
        seed: the seed of the run.
        image_seed: the image's own seed.
        variant: the number of the variant.

    Returns:
        The changes; None if `options` allow no change.
    """
    if not options.varies:
        return None
    # `pair` packs its two arguments into one number, which selects the generator's random numbers.
    offsets = generator(seed, "color", pair(image_seed, variant)).uniform(-1, 1, 4).tolist()
    return Colors(
        1 + options.brightness * offsets[0],
        1 + options.contrast * offsets[1],
        1 + options.saturation * offsets[2],
        options.hue * offsets[3],
    )


def _stretch(planes: Planes, origin: Planes | np.float32, factor: Planes | np.float32) -> None:
    """Multiply the differences between `planes` and `origin` by `factor`, in place, and clip."""
    planes -= origin
    planes *= factor
    planes += origin
    np.clip(planes, 0, _WHITE, out=planes)


def _luma(planes: Planes) -> Planes:
    """Return the luma of each pixel; shape (height, width)."""
    luma: Planes = np.tensordot(_LUMA, planes, axes=1)
    return luma


def _turned(planes: Planes, sixths: np.float32) -> Planes:
    """Return the channels after turning the hues by `sixths` sixths of the colour circle (HSV)."""
    red, green, blue = planes
    value, least = planes.max(0), planes.min(0)
    chroma = value - least
    # The hue in sixths of the circle: red is 0, green 2, blue 4. Greys have no hue; it becomes 0.
    divisor = np.where(chroma > 0, chroma, 1)
    hue = np.where(
        value == red,
        (green - blue) / divisor,
        np.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue += sixths
    turned = np.empty_like(planes)
    # Each channel is `value` minus `chroma` times a trapezium-shaped function of the hue, the same
    # for all channels up to a shift (`offset`).
    for plane, offset in zip(turned, (5, 3, 1), strict=True):
        position = (hue + offset) % 6
        plane[...] = value - chroma * np.clip(np.minimum(position, 4 - position), 0, 1)
    return turned
