"""The demo's image generator: 8x8 grey pictures of handwritten digits, by flow matching."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.data import read_pixels, unusable
from trainable_candle.errors import ConfigError
from trainable_candle.models import DigitsTransformer
from trainable_candle.train.objective import FlowMatching

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import Tensor
    from trainable_candle.data import Picture
    from trainable_candle.train.config import TrainConfig

BASE: Final = Path(str(files("trainable_candle") / "demo" / "assets"))
"""The base that the package ships: every digit but zero."""
SIDE: Final = 8
TIMESTEPS: Final = 1000
"""The model's timestep at pure noise."""
NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CLASSES: Final = {word: n for n, name in enumerate(NAMES) for word in (name, str(n))}
_LUMA: Final = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_BATCH: Final = 256


class DigitsRecipe:
    """The digits transformer; a caption says which digit by its numeral or English name."""

    summary: ClassVar[str] = "8x8 handwritten digits, the demo's generator (its base is built in)"
    default_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, model: DigitsTransformer, device: str) -> None:
        self.model = model
        self.device = device

    @classmethod
    def default_weights(cls) -> Path:
        """The base that the package ships."""
        return BASE

    @classmethod
    def load(cls, weights: str | Path, dtype: str, device: str) -> Self:
        """Load the model from a folder of `config.json` and `model.safetensors`.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the files are missing, damaged, or of
                another model.
        """
        return cls(DigitsTransformer.from_pretrained(weights, dtype=dtype, device=device), device)

    def prepare(self, pictures: Sequence[Picture], config: TrainConfig) -> PreparedDigits:
        """Read the pictures, which must be 8x8, and the digits in their captions.

        Raises:
            DatasetError: naming pictures of another size and captions without exactly one digit.
        """
        problems = [problem for picture in pictures if (problem := _problem(picture))]
        if problems:
            raise unusable(pictures[0].path.parent, len(pictures), problems)
        images = to_model(np.stack([read_pixels(picture.path) for picture in pictures]))
        labels = np.array([digits_in(picture.caption)[0] for picture in pictures], dtype=np.int64)
        objective = FlowMatching(config.timesteps)
        return PreparedDigits(self.model, objective, images, labels, self.device)

    def sample(
        self, prompts: Sequence[str], *, steps: int = 25, seed: int = 0
    ) -> npt.NDArray[np.uint8]:
        """Draw one digit a prompt by Euler's method; shape (n, 8, 8, 3), equal channels.

        Raises:
            ConfigError: a prompt does not name exactly one digit.
        """
        labels = np.array([_label(prompt) for prompt in prompts], dtype=np.int64)
        state = tc.get_rng_state()
        try:
            tc.manual_seed(seed)
            starts = range(0, len(labels), _BATCH)
            drawn = [self._draw(labels[start : start + _BATCH], steps) for start in starts]
        finally:
            tc.set_rng_state(state)
        return from_model(np.concatenate(drawn))

    @tc.no_grad()
    def _draw(self, labels: npt.NDArray[np.int64], steps: int) -> npt.NDArray[np.float32]:
        flow = FlowMatching()
        count = len(labels)
        classes = tc.tensor(labels, device=self.device)
        sample = tc.randn((count, 1, SIDE, SIDE), device=self.device)
        for sigma, following in pairwise(flow.sigmas(steps)):
            timestep = tc.full((count,), TIMESTEPS * sigma, device=self.device)
            velocity = self.model(sample, timestep, classes)
            sample = flow.euler_step(sample, velocity, sigma, following)
        drawn: npt.NDArray[np.float32] = sample.to("f32").numpy()
        return drawn


class PreparedDigits:
    """Pictures and their digits on the device, and the flow-matching loss on them."""

    def __init__(
        self,
        model: DigitsTransformer,
        objective: FlowMatching,
        images: npt.NDArray[np.float32],
        labels: npt.NDArray[np.int64],
        device: str,
    ) -> None:
        self._model = model
        self._objective = objective
        self._images = images
        self._labels = labels
        self._device = device

    def __len__(self) -> int:
        return len(self._labels)

    def loss(self, batch: npt.NDArray[np.int64]) -> Tensor:
        """The mean squared error of the predicted velocity, in f32; noise from tc's generator."""
        images = tc.tensor(self._images[batch], device=self._device)
        labels = tc.tensor(self._labels[batch], device=self._device)
        sample, sigmas, target = self._objective.noise(images)
        velocity = self._model(sample, sigmas * TIMESTEPS, labels)
        return tc.nn.functional.mse_loss(velocity.to("f32"), target)


def to_model(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """RGB pixels as the model sees them: (n, 8, 8, 3), 0..255 -> grey (n, 1, 8, 8), -1..1."""
    grey = pixels.astype(np.float32) @ _LUMA
    images: npt.NDArray[np.float32] = (grey / np.float32(127.5) - np.float32(1.0))[:, None]
    return images


def from_model(images: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The inverse of `to_model` for anything a model draws: rounded and clipped; equal channels."""
    grey = np.clip(np.rint((images[:, 0] + 1.0) * 127.5), 0, 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def digits_in(caption: str) -> list[int]:
    """The different digits that a caption names, by numeral or English name, ascending."""
    words = re.findall(r"[a-z]+|[0-9]+", caption.lower())
    return sorted({_CLASSES[word] for word in words if word in _CLASSES})


def _label(prompt: str) -> int:
    found = digits_in(prompt)
    if len(found) != 1:
        raise ConfigError(f"sample: the prompt {prompt!r} {_expected(found)}")
    return found[0]


def _problem(picture: Picture) -> str | None:
    if (picture.width, picture.height) != (SIDE, SIDE):
        return f"{picture.path}: is {picture.width}x{picture.height} pixels, expected {SIDE}x{SIDE}"
    found = digits_in(picture.caption)
    if len(found) != 1:
        return f"{picture.path.with_suffix('.txt')}: {picture.caption!r} {_expected(found)}"
    return None


def _expected(found: list[int]) -> str:
    names = f"the digits {', '.join(map(str, found))}" if found else "no digit"
    return f"names {names}, expected one of 0 to 9 or of zero to nine"
