"""The demo's image generator: 8x8 grey images of handwritten digits, by flow matching."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.data import (
    CaptionOptions,
    Dataset,
    DatasetOptions,
    Source,
    check_folder,
    unusable,
)
from trainable_candle.data import Item as DatasetItem
from trainable_candle.data.buckets import Bucket, Fit
from trainable_candle.errors import ConfigError
from trainable_candle.models import DigitsTransformer
from trainable_candle.settings.adapter import Adapter
from trainable_candle.settings.data import Data, DefaultCaption
from trainable_candle.settings.files import Files
from trainable_candle.settings.machine import Machine
from trainable_candle.settings.objective import Loss, NoiseLevels
from trainable_candle.settings.previews import Denoising, Previews, Validation
from trainable_candle.settings.several import Several
from trainable_candle.settings.training import Training
from trainable_candle.tasks.estimate import Estimate, Item, trained_model
from trainable_candle.tasks.latent.family import LatentFamily
from trainable_candle.tasks.latent.objectives import FlowObjective, FlowSampler
from trainable_candle.train.adapters import adapter_config
from trainable_candle.train.objective import FlowMatching

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy.typing as npt

    from trainable_candle import PartFacts, Tensor
    from trainable_candle.data import ImageFile
    from trainable_candle.models import Model
    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.tasks.estimate import Shape
    from trainable_candle.tasks.task import Split
    from trainable_candle.train.trainer import Inputs

BASE: Final = Path(str(files("trainable_candle") / "demo" / "assets"))
"""The folder of the built-in base model, which was trained on every digit but zero."""
SIDE: Final = 8
"""The height and the width of an image, in pixels."""
NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGITS: Final = {word: digit for digit, name in enumerate(NAMES) for word in (name, str(digit))}
"""English name or numeral -> digit."""
_LUMA: Final = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""The weights of red, green and blue in a grey value."""
_DRAWING_BYTES: Final = 32
"""The bytes of memory that drawing an image takes for each of its pixels."""


class Pixels:
    """Takes the place of an autoencoder: the latents of an image are its grey pixels."""

    factor = 1
    channels = 1

    def identity(self) -> None:
        """Return None: computing latents is so fast that a cache would save no time."""

    def encode(self, pixels: npt.NDArray[np.uint8]) -> dict[str, Tensor]:
        """Return the grey pixels as `mean`; see `to_model`."""
        return {"mean": tc.tensor(to_model(pixels))}

    def latents(self, encoded: Mapping[str, Tensor], normal: Callable[[], Tensor] | None) -> Tensor:  # noqa: ARG002
        """Return the grey pixels in `encoded`; nothing is drawn with `normal`."""
        return encoded["mean"]

    def decode(self, latents: Tensor) -> Tensor:
        """Return the latents, which are the pixels already."""
        return latents

    def load(self) -> None:
        """Do nothing: there is nothing to load."""

    def drop(self) -> None:
        """Do nothing: there is nothing to free."""


class Digits(LatentFamily):
    """The digits transformer; a caption names one digit, as a numeral or an English word."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "8x8 handwritten digits, the demo's generator (its base is built in)"
    groups: ClassVar[tuple[type[Group], ...]] = (
        Data, DefaultCaption, Adapter, Training, Loss, NoiseLevels, Validation, Previews, Denoising,
        Machine, Several, Files,
    )  # fmt: skip
    # The base classes describe these. The transformer is the only part, so it has no name.
    component: ClassVar[str] = ""
    formats: ClassVar[tuple[str, ...]] = ("peft", "kohya", "diffusers")
    targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    at_once: ClassVar[int] = 256  # the batch size of drawing, the least batch size of validation
    validation_examples: ClassVar[int] = 1  # the least number; as it is 1, no image is used twice
    coder: ClassVar[Pixels] = Pixels()
    resolution: ClassVar[int] = SIDE

    @classmethod
    def default_weights(cls) -> Path:
        """Return the base that the package ships."""
        return BASE

    def require_own(self) -> None:
        """Check the weights by loading the transformer, which is small.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """
        _ = self.model

    def check_initial_adapter(self, path: Path, layers: Collection[str]) -> None:  # noqa: ARG002
        """Check that the file can be read.

        Raises:
            MissingFileError, WeightsFormatError: the file is missing or damaged.
        """
        tc.verify_adapter(path, self.name)

    def check_prompt(self, prompt: str) -> None:
        """Check that a prompt names exactly one digit.

        Raises:
            ConfigError: the prompt names no digit, or several.
        """
        _digit(prompt)

    @property
    def _facts(self) -> PartFacts:
        return tc.inspect(self.weights, self.name).parts[self.component]

    def layers(self) -> Mapping[str, Shape]:
        """Return the shapes of the weights of the transformer's linear layers, by name."""
        return self._facts.layers

    def dataset(self, folder: str) -> Dataset:
        """Read a folder of images of 8x8 pixels, with captions that each name one digit.

        Raises:
            DatasetError: the folder cannot be used, an image has another size, or a caption does
                not name exactly one digit; the message names the files.
        """
        images = check_folder(folder, self.config.caption)
        problems = [problem for image in images if (problem := _problem(image))]
        if problems:
            raise unusable(images[0].path.parent, len(images), problems)
        # No image is scaled or cropped.
        fit = Fit(Bucket(SIDE, SIDE), original=(SIDE, SIDE), scaled=(SIDE, SIDE))
        return Dataset(
            [
                DatasetItem(image, fit, trigger="", loss_weight=1.0, repeats=1.0, mask="off")
                for image in images
            ],
            DatasetOptions((Source(Path(folder)),), resolution=SIDE, bucket_step=SIDE),
            CaptionOptions(),
            self.config.seed,
            f"dataset: {len(images)} images in {folder}",
        )

    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:  # noqa: ARG002
        """Estimate the memory of a run: the model, its adapters and, on the CPU, the images.

        The estimate for a GPU is of GPU memory, so it leaves out the images, which are on the CPU.
        """
        adapter = adapter_config(config, self.targets, self.formats)
        sizes = {"height": SIDE, "width": SIDE}
        trained = trained_model("model", self._facts, adapter, config, **sizes)
        if not config.on_gpu:
            count = len(data.train) + len(data.validation or ())
            # Grey pixels in f32, 4 bytes each.
            trained.items.append(Item("images", what="", bytes=4 * count * SIDE**2))
        phases = {**trained.early_phases, "training": trained.items}
        return Estimate(phases, config.on_gpu, trained.work, trained.host)

    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """Return the bytes that drawing `count` images of `size` (width, height) takes.

        The transformer, which is small, does not count.
        """
        return count * size[0] * size[1] * _DRAWING_BYTES

    @cached_property
    def model(self) -> DigitsTransformer:
        """The transformer, which is loaded on first use."""
        return DigitsTransformer.from_pretrained(
            self.weights,
            dtype=self.dtype,
            device=self.device,
            quantize=self.config.base_format,
            **self.config.streaming,
        )

    def objective(self, device: str) -> FlowObjective:  # noqa: ARG002
        """Return flow matching: the transformer learns the velocity, noise minus latents."""
        return FlowObjective(self.config)

    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> FlowSampler:  # noqa: ARG002
        """Return Euler's method with `steps` steps, the only sampler of this family."""
        return FlowSampler(FlowMatching().sigmas(steps))

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`."""
        return self.model(sample, times, conditions["class_labels"])

    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return `class_labels` (B,), i64: the digit that each caption names.

        Raises:
            ConfigError: a caption does not name exactly one digit.
        """
        labels = np.array([_digit(caption) for caption in captions], dtype=np.int64)
        return {"class_labels": tc.tensor(labels, device=self.device)}

    def adapted_parts(self, path: Path) -> Sequence[str]:  # noqa: ARG002
        """Return the only part, the transformer, whose name is empty."""
        return (self.component,)

    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write the model to a new or an empty folder.

        Raises:
            ConfigError: `output` is a file, or a folder that is not empty.
            OSError: the folder cannot be written.
        """
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(
                f"--output is {output}, which exists; expected a new or an empty folder"
            )
        models[self.component].save_pretrained(output)

    def require_quantized(self, output: Path, to: str) -> None:  # noqa: ARG002
        """Raise an error: the demo's model cannot be written quantized.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"--to {to}: {self.name} cannot be written quantized; leave --to out")

    def save_quantized(self, models: Mapping[str, Model], output: Path, to: str) -> None:  # noqa: ARG002
        """Raise an error, as `require_quantized`.

        Raises:
            ConfigError: always.
        """
        self.require_quantized(output, to)


def to_model(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Convert RGB pixels (n, 8, 8, 3), 0 to 255, to grey (n, 1, 8, 8), -1 to 1."""
    grey = pixels.astype(np.float32) @ _LUMA
    images: npt.NDArray[np.float32] = (grey / np.float32(127.5) - np.float32(1.0))[:, None]
    return images


def digits_in(caption: str) -> list[int]:
    """Return the digits that a caption names as numerals or English words, each once, ascending."""
    words = re.findall(r"[a-z]+|[0-9]+", caption.lower())
    return sorted({_DIGITS[word] for word in words if word in _DIGITS})


@lru_cache(maxsize=1024)
def _digit(prompt: str) -> int:
    """Return the one digit that a prompt names."""
    found = digits_in(prompt)
    if len(found) != 1:
        raise ConfigError(f"sample: the prompt {prompt!r} {_expected(found)}")
    return found[0]


def _problem(image: ImageFile) -> str | None:
    """Return why an image or its caption cannot be used; None if both can."""
    if (image.width, image.height) != (SIDE, SIDE):
        return f"{image.path}: is {image.width}x{image.height} pixels, expected {SIDE}x{SIDE}"
    found = digits_in(image.caption)
    if len(found) != 1:
        return f"{image.path.with_suffix('.txt')}: {image.caption!r} {_expected(found)}"
    return None


def _expected(found: list[int]) -> str:
    """Return the end of a message about a text that names these digits, not exactly one."""
    names = f"the digits {', '.join(map(str, found))}" if found else "no digit"
    return f"names {names}, expected one of 0 to 9 or of zero to nine"
