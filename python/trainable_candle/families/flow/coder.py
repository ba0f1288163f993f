"""Autoencoders whose latents are normalised, each channel by its own mean and deviation."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.families.flow.patches import from_squares, squares
from trainable_candle.models import AutoencoderKL, AutoencoderKLQwenImage
from trainable_candle.tasks.latent.coders import KLCoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle import Tensor

_SIDE: Final = 2
"""The side of a packed square, in latent pixels."""
_MEAN, _VARIANCE = "bn.running_mean", "bn.running_var"
"""The names of the batch norm's statistics among the tensors of FLUX.2's autoencoder."""


class NormedKLCoder(KLCoder):
    """FLUX.2's autoencoder, whose latents are packed, then normalised.

    The 2x2 latent pixels of a square become channels. Each of these channels is normalised by the
    running statistics of a batch norm.

    Follows `_encode_vae_image` of diffusers' pipeline of FLUX.2:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/flux2/pipeline_flux2_klein.py

    Args:
        source, config, factor, device, identity: see `KLCoder`; `factor` and the channels in
            `config` describe the latents before packing.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        config: Mapping[str, Any],
        factor: int,
        device: str,
        identity: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(source, config, factor, device, identity)
        self.channels *= _SIDE**2
        self.factor *= _SIDE
        self._eps = float(config["batch_norm_eps"])

    @cached_property
    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each of the C packed channels, both (C, 1, 1), in host memory."""
        # `KLCoder.model` loads the autoencoder on first use and keeps it. If it is not loaded yet,
        # load it here without keeping it: only the statistics stay in memory.
        loaded = self.__dict__.get("model")
        model = loaded or AutoencoderKL.from_pretrained(**self._source, dtype="f32", device="cpu")
        tensors = model.named_tensors()
        mean, variance = (tensors[name].to("cpu").reshape(-1, 1, 1) for name in (_MEAN, _VARIANCE))
        return mean, (variance + self._eps).sqrt()

    def latents(
        self,
        encoded: Mapping[str, Tensor],
        normal: Callable[[], Tensor] | None,  # noqa: ARG002
    ) -> Tensor:
        """Return the means in `encoded`, packed and normalised.

        As in diffusers' training script, latents are not drawn from their distribution.
        """
        packed = squares(encoded["mean"])
        mean, deviation = (statistic.to(str(packed.device)) for statistic in self._statistics)
        return (packed - mean) / deviation

    def decode(self, latents: Tensor) -> Tensor:
        """Return images (n, 3, h, w), -1 to 1."""
        mean, deviation = (statistic.to(str(latents.device)) for statistic in self._statistics)
        return super().decode(from_squares(latents.to("f32") * deviation + mean))


class QwenImageCoder(KLCoder):
    """Qwen-Image's autoencoder, whose configuration has a mean and a deviation for each channel.

    Follows the end of `__call__` of diffusers' pipeline, whose variable `latents_std` is 1 divided
    by the `latents_std` of the autoencoder's configuration:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/qwenimage/pipeline_qwenimage.py

    Args:
        source, config, factor, device, identity: see `KLCoder`.
    """

    kind: ClassVar[type[AutoencoderKL | AutoencoderKLQwenImage]] = AutoencoderKLQwenImage

    def __init__(
        self,
        source: Mapping[str, Any],
        config: Mapping[str, Any],
        factor: int,
        device: str,
        identity: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(source, config, factor, device, identity)
        mean, deviation = (
            tc.tensor(np.array(config[name], np.float32)).reshape(-1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        self._statistics = mean, deviation

    def latents(self, encoded: Mapping[str, Tensor], normal: Callable[[], Tensor] | None) -> Tensor:
        """Draw latents from the distributions in `encoded`, and normalise them.

        `normal` returns the standard normal numbers for the draw. If it is None, the latents are
        the normalised means of the distributions.
        """
        drawn = self.drawn(encoded, normal)
        mean, deviation = (statistic.to(str(drawn.device)) for statistic in self._statistics)
        return (drawn - mean) / deviation

    def decode(self, latents: Tensor) -> Tensor:
        """Return images (n, 3, h, w), -1 to 1."""
        mean, deviation = (statistic.to(str(latents.device)) for statistic in self._statistics)
        return super().decode(latents.to("f32") * deviation + mean)
