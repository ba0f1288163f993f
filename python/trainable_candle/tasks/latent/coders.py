"""Coders, which turn images into latents and back."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import trainable_candle as tc
from trainable_candle.models import AutoencoderKL, AutoencoderKLQwenImage
from trainable_candle.tasks.latent.tiles import TILE, WHOLE, tile_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from trainable_candle import Tensor


class Coder(Protocol):
    """Turns images into latents that a model learns, and latents into images."""

    @property
    def factor(self) -> int:
        """Pixels of an image per element of its latents, in width and in height."""

    @property
    def channels(self) -> int:
        """Channels of a latent."""

    def identity(self) -> dict[str, str] | None:
        """Return what latents depend on besides pixels, by name; None if a cache saves no time.

        Raises:
            OSError: a file cannot be read.
        """

    def encode(self, pixels: npt.NDArray[np.uint8]) -> dict[str, Tensor]:
        """Encode images (n, h, w, 3), 0 to 255; return tensors of n rows by name, for a cache."""

    def latents(self, encoded: Mapping[str, Tensor], normal: Callable[[], Tensor] | None) -> Tensor:
        """Return the latents (n, channels, h / factor, w / factor) that the model learns, f32.

        Args:
            encoded: the result of `encode`.
            normal: returns standard normal numbers in the shape of `encoded["mean"]`. A coder that
                encodes images as distributions draws the latents with them; if None, the latents
                are the means.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images (n, 1 or 3, h, w), -1 to 1."""

    def load(self) -> None:
        """Load what `encode` and `decode` need, if it is not loaded."""

    def drop(self) -> None:
        """Free what `load` has loaded."""


class KLCoder:
    """A coder with a KL autoencoder, which computes in f32: its activations overflow in f16.

    Args:
        source: the arguments of `kind.from_pretrained`, without the dtype and the device.
        config: the configuration of the autoencoder.
        factor: pixels of an image per element of its latents, in width and in height.
        device: the device that the autoencoder computes on.
        identity: returns the identity of the autoencoder's weights and configuration.
    """

    kind: ClassVar[type[AutoencoderKL | AutoencoderKLQwenImage]] = AutoencoderKL
    """The class of the autoencoder."""

    def __init__(
        self,
        source: Mapping[str, Any],
        config: Mapping[str, Any],
        factor: int,
        device: str,
        identity: Callable[[], Mapping[str, str]],
    ) -> None:
        # Qwen-Image's configuration has `z_dim`, the other configurations have `latent_channels`.
        self.channels = int(config.get("z_dim") or config["latent_channels"])
        self.factor = factor
        # A subclass that packs latents enlarges `factor`, but not `_autoencoder_factor`.
        self._autoencoder_factor = factor
        self._scaling_factor = float(config.get("scaling_factor", 1.0))
        # The entry may be null.
        self._shift_factor = float(config.get("shift_factor") or 0.0)
        self._source = source
        self._device = device
        self._identity = identity

    @cached_property
    def model(self) -> AutoencoderKL | AutoencoderKLQwenImage:
        """The autoencoder."""
        return self.kind.from_pretrained(**self._source, dtype="f32", device=self._device)

    def identity(self) -> dict[str, str]:
        """Return the identity of the autoencoder's files, its dtype and its tile size, for a cache.

        Raises:
            OSError: a file cannot be read.
        """
        # Images of more than WHOLE pixels are encoded in tiles, with sides of TILE pixels.
        return {**self._identity(), "dtype": "f32", "tile": f"{TILE} above {WHOLE}"}

    def encode(self, pixels: npt.NDArray[np.uint8]) -> dict[str, Tensor]:
        """Return the latents' mean and logarithm of the variance, neither shifted nor scaled."""
        # Copy the pixels to the device as bytes, and convert them to f32 there.
        image = tc.tensor(pixels, device=self._device).permute(0, 3, 1, 2).to("f32")
        height, width = image.shape[2:]
        tile = tile_size(width, height)  # None: do not divide the image
        mean, logvar = self.model.encode(image / 127.5 - 1.0, tile_size=tile)
        return {"mean": mean, "logvar": logvar}

    def latents(self, encoded: Mapping[str, Tensor], normal: Callable[[], Tensor] | None) -> Tensor:
        """Return latents as `drawn` does, but shifted and scaled for the model."""
        latents = self.drawn(encoded, normal)
        shifted = latents - self._shift_factor if self._shift_factor else latents
        return shifted * self._scaling_factor

    @staticmethod
    def drawn(encoded: Mapping[str, Tensor], normal: Callable[[], Tensor] | None) -> Tensor:
        """Draw latents from the distributions `encoded`, or take their means if `normal` is None.

        The latents are neither shifted nor scaled.
        """
        mean = encoded["mean"]
        return mean if normal is None else mean + (encoded["logvar"] * 0.5).exp() * normal()

    def decode(self, latents: Tensor) -> Tensor:
        """Undo the scale and the shift of `latents`, and decode to images (n, 3, h, w), -1 to 1."""
        height, width = latents.shape[2:]
        latents = latents.to("f32") / self._scaling_factor
        latents = latents + self._shift_factor if self._shift_factor else latents
        factor = self._autoencoder_factor
        tile = tile_size(width * factor, height * factor)
        return self.model.decode(latents, tile_size=tile)

    def load(self) -> None:
        """Load the autoencoder, if it is not loaded."""
        _ = self.model

    def drop(self) -> None:
        """Free the autoencoder, if it is loaded."""
        self.__dict__.pop("model", None)
