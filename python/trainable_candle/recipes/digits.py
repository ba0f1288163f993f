"""The demo's image generator: 8x8 grey pictures of handwritten digits, by flow matching."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.data import ShuffledBatches, check_folder, read_pixels, unusable
from trainable_candle.draws import draw_from
from trainable_candle.errors import ConfigError
from trainable_candle.models import DigitsTransformer
from trainable_candle.recipes import existing
from trainable_candle.recipes.adapters import Adapters, adapter_config
from trainable_candle.recipes.base import SampleOptions, Split, held_out_items
from trainable_candle.train.checks import check_format, check_targets
from trainable_candle.train.config import OBJECTIVE, PICTURES, settings
from trainable_candle.train.estimate import (
    ITEM_BYTES,
    Estimate,
    Item,
    adapter_items,
    available_bytes,
    require_memory,
)
from trainable_candle.train.objective import FlowMatching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.data import Picture
    from trainable_candle.train.config import TrainConfig
    from trainable_candle.train.trainer import Inputs

BASE: Final = Path(str(files("trainable_candle") / "demo" / "assets"))
"""The base that the package ships: every digit but zero."""
SIDE: Final = 8
TIMESTEPS: Final = 1000
"""The model's timestep at pure noise."""
NAMES: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CLASSES: Final = {word: n for n, name in enumerate(NAMES) for word in (name, str(n))}
_LUMA: Final = np.array([0.299, 0.587, 0.114], dtype=np.float32)
VALIDATION_SEED: Final = 20_261_121
_BATCH: Final = 256
_SAMPLE_BYTES: Final = 32
"""Of each pixel of a picture that is drawn, until it is in a grid."""


class DigitsRecipe:
    """The digits transformer; a caption says which digit by its numeral or English name."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "8x8 handwritten digits, the demo's generator (its base is built in)"
    parts: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[frozenset[str]] = frozenset(
        name
        for name, (_, setting) in settings().items()
        if setting.group in {PICTURES, OBJECTIVE} and name != "timesteps"
    ) | {
        "resolution", "train_text_encoder", "text_encoder_learning_rate", "trigger",
        "caption_dropout",
        "caption_shuffle", "caption_keep_tokens", "caption_tag_dropout", "caption_separator",
        "caption_variants", "negative_prompt", "guidance", "sampler", "sample_size",
    }  # fmt: skip
    default_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, model: DigitsTransformer, device: str) -> None:
        self.model = model
        self.device = device

    @classmethod
    def default_weights(cls) -> Path:
        """The base that the package ships."""
        return BASE

    @classmethod
    def check(
        cls,
        weights: Path,
        config: TrainConfig,
        report: Callable[[str], None],  # noqa: ARG003
    ) -> None:
        """Check the settings against the headers of the weights.

        Raises:
            ConfigError: a value does not suit the model.
            MissingFileError, WeightsFormatError: a file is missing or damaged.
        """
        check_format(config, ("peft", "kohya", "diffusers"), parts=1)
        if config.sample_prompts:
            for prompt in config.sample_prompts:
                _label(prompt)
        check_targets(config, tc.inspect(weights, cls.name).parts[""].layers, cls.default_targets)
        if config.initial_adapter and not config.resume:
            tc.verify_adapter(existing("initial_adapter", config.initial_adapter_path), cls.name)

    @classmethod
    def read(
        cls,
        weights: Path,  # noqa: ARG003
        config: TrainConfig,
        report: Callable[[str], None],
    ) -> Split[list[Picture]]:
        """Find the pictures, which must be 8x8, and the digits in their captions.

        Raises:
            DatasetError: naming pictures of another size and captions without exactly one digit.
        """
        pictures = _checked(config.dataset, config.caption)
        report(f"dataset: {len(pictures)} pictures in {config.dataset}")
        if config.validation_dataset:
            return Split(pictures, _checked(config.validation_dataset, config.caption))
        if not config.validation_split:
            return Split(pictures)
        held_out = set(held_out_items(len(pictures), config.validation_split, config.seed))
        train = [p for number, p in enumerate(pictures) if number not in held_out]
        return Split(train, [pictures[number] for number in sorted(held_out)])

    @classmethod
    def estimate(
        cls,
        weights: Path,
        config: TrainConfig,
        data: Split[list[Picture]],
        limit: float = math.inf,  # noqa: ARG003
    ) -> Estimate:
        """What a run will hold in memory.

        Raises:
            MissingFileError, WeightsFormatError: the weights are missing or damaged.
        """
        model, adapter = (
            tc.inspect(weights, cls.name).parts[""],
            adapter_config(config, cls.default_targets),
        )
        pictures = len(data.train) + len(data.validation or ())
        policy = config.gradient_checkpointing
        count = config.batch_size * model.saved_values(adapter, policy, height=SIDE, width=SIDE)
        items = [
            Item("model", "weights", model.elements * ITEM_BYTES[config.precision]),
            *adapter_items("model", model.layers, adapter, config),
            Item("model", "activations", count * ITEM_BYTES[config.precision]),
        ]
        if not config.on_gpu:
            items.append(Item("pictures", "", 4 * pictures * SIDE**2))
        return Estimate({"training": items}, config.on_gpu)

    @classmethod
    def load(cls, weights: Path, dtype: str | None, device: str) -> Self:
        """Load the model from a folder of `config.json` and `model.safetensors`.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the files are missing, damaged, or of
                another model.
        """
        return cls(DigitsTransformer.from_pretrained(weights, dtype=dtype, device=device), device)

    def attach(self, config: TrainConfig) -> Adapters:
        """Put adapters on the transformer.

        Raises:
            ConfigError: a target matches no layer.
        """
        if config.gradient_checkpointing != "none":
            self.model.enable_gradient_checkpointing(config.gradient_checkpointing)
        return Adapters({"": self.model.add_adapter(adapter_config(config, self.default_targets))})

    def prepare(
        self,
        data: Split[list[Picture]],
        config: TrainConfig,
        report: Callable[[str], None],  # noqa: ARG002
    ) -> Split[PreparedDigits]:
        """Read the pictures.

        Raises:
            DatasetError: a picture cannot be read any more.
        """
        objective = FlowMatching(config.timesteps)

        def prepared(pictures: Sequence[Picture]) -> PreparedDigits:
            images = to_model(np.stack([read_pixels(picture.path) for picture in pictures]))
            labels = [digits_in(picture.caption)[0] for picture in pictures]
            numbers = np.array(labels, dtype=np.int64)
            return PreparedDigits(self.model, objective, images, numbers, config.seed, self.device)

        validation = None if data.validation is None else prepared(data.validation)
        return Split(prepared(data.train), validation)

    def require_room(self, count: int, options: SampleOptions) -> None:  # noqa: ARG002
        """Check that there is memory to draw `count` pictures.

        Raises:
            OutOfMemoryError: there is too little.
        """
        limit = available_bytes("cpu")
        require_memory(f"{count} pictures", count * SIDE**2 * _SAMPLE_BYTES, limit)

    def sample(
        self, prompts: Sequence[str], options: SampleOptions | None = None
    ) -> npt.NDArray[np.uint8]:
        """Draw one digit a prompt by Euler's method; shape (n, 8, 8, 3), equal channels.

        Raises:
            ConfigError: a prompt does not name exactly one digit, or an option means nothing here.
        """
        options = options or SampleOptions()
        options.require_default(self.name, "guidance", "negative_prompt", "size", "sampler")
        labels = np.array([_label(prompt) for prompt in prompts], dtype=np.int64)
        starts = range(0, len(labels), _BATCH)
        drawn: list[npt.NDArray[np.float32]] = draw_from(
            options.seed,
            lambda: [self._draw(labels[at : at + _BATCH], options.steps) for at in starts],
        )
        return from_model(np.concatenate(drawn))

    def adapter_file(
        self, adapters: Adapters, path: Path, config: TrainConfig, metadata: dict[str, str]
    ) -> AdapterFile:
        """The present values of the adapter for a file, which is written later.

        Raises:
            ArgumentError: the format cannot hold the adapter.
        """
        return adapters.file(path, config, metadata)

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Put the adapter of a file on the model.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """
        return Adapters({"": self.model.load_adapter(path, scale=scale)})

    def save_merged(self, output: Path) -> None:
        """Write the model with its adapter merged into the weights, to a new or an empty folder.

        Raises:
            ConfigError: there is something else.
            OSError: the folder cannot be written.
        """
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(
                f"--output is {output}, which exists; expected a new or an empty folder"
            )
        self.model.merge_adapter()
        self.model.save_pretrained(output)

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


@dataclass(frozen=True)
class DigitsBatch:
    """Pictures by number, and which samples of the run they are."""

    samples: Sequence[int]
    pictures: npt.NDArray[np.int64]


class DigitsBatches:
    """Batches by number, a `BatchSource` for the trainer."""

    def __init__(self, pictures: int, batch_size: int, seed: int) -> None:
        self._size = batch_size
        self._order = ShuffledBatches(pictures, batch_size, seed)

    def batch(self, index: int) -> DigitsBatch:
        """Batch number `index`, from 0; the same whenever it is asked for."""
        samples = range(index * self._size, (index + 1) * self._size)
        return DigitsBatch(samples, self._order.batch(index))

    def first_batch(self, epoch: int) -> int:
        """The number of the first batch of a pass over everything; passes are counted from 0."""
        return self._order.first_batch(epoch)


class PreparedDigits:
    """Pictures and their digits, and the flow-matching loss of a model on them."""

    def __init__(
        self,
        model: DigitsTransformer,
        objective: FlowMatching,
        images: npt.NDArray[np.float32],
        labels: npt.NDArray[np.int64],
        seed: int,
        device: str,
    ) -> None:
        self._model = model
        self._objective = objective
        self._images = images
        self._labels = labels
        self._seed = seed
        self._device = device

    def __len__(self) -> int:
        return len(self._labels)

    def batches(self, batch_size: int, seed: int) -> DigitsBatches:
        """Numbers of pictures."""
        return DigitsBatches(len(self), batch_size, seed)

    def validation_loss(self) -> float:
        """The mean loss, each picture with the same noise and noise level at every call."""
        starts = range(0, len(self), _BATCH)
        losses = []
        for examples in (range(start, min(start + _BATCH, len(self))) for start in starts):
            pictures = np.array(examples)
            images = tc.tensor(self._images[pictures])
            noised = self._objective.validation_noise(images, examples, VALIDATION_SEED)
            loss = self.loss(self._inputs(pictures, noised))
            losses.append(float(loss.item()) * len(examples))
        return math.fsum(losses) / len(self)

    def inputs(self, batch: DigitsBatch) -> dict[str, Tensor]:
        """Pictures under noise, by their numbers in the run; what to say of them, their digits."""
        images = tc.tensor(self._images[batch.pictures])
        noised = self._objective.noise(images, batch.samples, self._seed)
        return self._inputs(batch.pictures, noised)

    def _inputs(
        self, pictures: npt.NDArray[np.int64], noised: tuple[Tensor, Tensor, Tensor]
    ) -> dict[str, Tensor]:
        sample, sigmas, target = noised
        made = {
            "sample": sample,
            "timestep": sigmas * TIMESTEPS,
            "class_labels": tc.tensor(self._labels[pictures]),
            "target": target,
        }
        return {name: tensor.to(self._device) for name, tensor in made.items()}

    def loss(self, inputs: Inputs) -> Tensor:
        """The mean squared error of the predicted velocity, in f32."""
        velocity = self._model(inputs["sample"], inputs["timestep"], inputs["class_labels"])
        return tc.nn.functional.mse_loss(velocity.to("f32"), inputs["target"])


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


def _checked(folder: str, caption: str | None) -> list[Picture]:
    pictures = check_folder(folder, caption)
    problems = [problem for picture in pictures if (problem := _problem(picture))]
    if problems:
        raise unusable(pictures[0].path.parent, len(pictures), problems)
    return pictures


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
