"""What a model must say about itself to be trained and sampled from the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from trainable_candle.draws import generator
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.train.trainer import BatchSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.recipes.adapters import Adapters
    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.train.estimate import Estimate
    from trainable_candle.train.trainer import Inputs

BatchT = TypeVar("BatchT")
BatchOut = TypeVar("BatchOut", covariant=True)
PartT = TypeVar("PartT", covariant=True)


@dataclass(frozen=True)
class SampleOptions:
    """How pictures are drawn; None stands for what suits the model."""

    steps: int = 25
    """Steps of the sampler, at least 1."""
    seed: int = 0
    """Seed of the noise."""
    guidance: float | None = None
    """Scale of classifier-free guidance; 1 is none."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    size: tuple[int, int] | None = None
    """Width and height, px."""
    sampler: str | None = None
    """`euler` or `dpmpp_2m`."""

    def require_default(self, model: str, *names: str) -> None:
        """Check options that mean nothing to a model.

        Raises:
            ConfigError: one of them is given.
        """
        default = SampleOptions()
        for name in names:
            if getattr(self, name) != getattr(default, name):
                raise ConfigError(f"sample: {name} has no effect on the model `{model}`")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from `1024x768`, or from `1024` for a square.

    Raises:
        ConfigError: the text is neither.
    """
    match = re.fullmatch(r"(\d{1,5})(?:[xX](\d{1,5}))?", text.strip(), re.ASCII)
    if match is None or not int(match[1]) or not int(match[2] or 1):
        raise ConfigError(f"size: {text!r} is no size in pixels, expected WIDTHxHEIGHT")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class Split(Generic[PartT]):
    """What is trained on, and what the training is validated on."""

    train: PartT
    validation: PartT | None = None


def held_out_items(count: int, share: float, seed: int) -> list[int]:
    """Which of `count` items a validation gets: by seed alone, at least one, not all.

    Raises:
        DatasetError: there is only one item.
    """
    if count < 2:
        raise DatasetError(
            f"dataset: {count} picture cannot be split into training and validation; "
            "leave validation_split out, or give validation_dataset"
        )
    held_out = min(max(1, round(count * share)), count - 1)
    order = generator(seed, "split").permutation(count)
    return sorted(int(number) for number in order[:held_out])


class EpochSource(BatchSource[BatchOut], Protocol[BatchOut]):
    """Batches by number, which form epochs."""

    def first_batch(self, epoch: int) -> int:
        """The number of the first batch of an epoch, counted from 0."""


class Prepared(Protocol[BatchT]):
    """A data set in the form that the model trains on."""

    def batches(self, batch_size: int, seed: int) -> EpochSource[BatchT]:
        """Shuffled batches for training."""

    def inputs(self, batch: BatchT) -> Inputs:
        """What the loss of a batch is computed from, by name, on the model's device.

        Whatever is random is drawn on the host from streams of the run's seed and the samples'
        numbers (`draws`): a resumed run repeats it, and a run on a GPU sees what one on the CPU
        would.
        """

    def loss(self, inputs: Inputs) -> Tensor:
        """The training loss on what `inputs` gave, a single element; nothing leaves the device."""

    def validation_loss(self) -> float:
        """The mean loss over everything, with the same noise and noise levels at every call.

        The library's generator is left as it was.
        """

    def __len__(self) -> int:
        """The number of pictures."""


class Recipe(Protocol):
    """One loaded model with everything around it: other parts, data, objective, files."""

    name: ClassVar[str]
    """What `--model` calls it."""
    summary: ClassVar[str]
    """What the model is, in a line."""
    parts: ClassVar[tuple[str, ...]]
    """The folders of its models in a pipeline; none if it is no pipeline."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that mean something to this model; to give others is an error."""

    @classmethod
    def default_weights(cls) -> Path | None:
        """The weights that the package ships, if it ships any."""

    @classmethod
    def check(cls, weights: Path, config: TrainConfig, report: Callable[[str], None]) -> None:
        """Check the settings against the headers of the weights; nothing else is read yet.

        Raises:
            ConfigError, ArgumentError: a value lies outside its range or does not suit the model.
            MissingFileError, WeightsFormatError: the weights, or the initial adapter, are missing,
                damaged, or of another model.
        """

    @classmethod
    def read(cls, weights: Path, config: TrainConfig, report: Callable[[str], None]) -> Split[Any]:
        """Find and check the pictures and captions; the model is not loaded yet.

        Raises:
            DatasetError: a picture or a caption does not suit the model, or there is none.
        """

    @classmethod
    def estimate(
        cls, weights: Path, config: TrainConfig, data: Split[Any], limit: float
    ) -> Estimate:
        """What a run will hold in memory, from the headers of the files alone.

        Args:
            weights: the model.
            config: the settings.
            data: what `read` found.
            limit: bytes that there are, for what is done in larger pieces where there are more.

        Raises:
            MissingFileError, WeightsFormatError: the files are missing, damaged, or of another
                model.
        """

    @classmethod
    def load(cls, weights: Path, dtype: str | None, device: str) -> Self:
        """Load the model.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the files are missing, damaged, or of
                another model.
        """

    def attach(self, config: TrainConfig) -> Adapters:
        """Put trainable adapters on it, and set its checkpointing, as the settings say.

        Raises:
            ConfigError: a target matches no layer.
        """

    def prepare(
        self, data: Split[Any], config: TrainConfig, report: Callable[[str], None]
    ) -> Split[Prepared[Any]]:
        """Turn what `read` found into what the model trains on, and drop what served only for that.

        Raises:
            DatasetError: a picture cannot be read any more.
        """

    def require_room(self, count: int, options: SampleOptions) -> None:
        """Check that there is memory to draw `count` pictures.

        Raises:
            OutOfMemoryError: there is too little.
        """

    def sample(self, prompts: Sequence[str], options: SampleOptions) -> npt.NDArray[np.uint8]:
        """One picture a prompt; shape (n, height, width, 3).

        The library's generator is left as it was.

        Raises:
            ConfigError: a prompt or an option does not suit the model.
        """

    def adapter_file(
        self, adapters: Adapters, path: Path, config: TrainConfig, metadata: dict[str, str]
    ) -> AdapterFile:
        """The present values of the adapters for one file, which is written later.

        It has the format and precision of the settings.

        Raises:
            ArgumentError: the format cannot hold these adapters.
        """

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Put the adapters of a file on the model, their effect multiplied by `scale`.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """

    def save_merged(self, output: Path) -> None:
        """Write the model with its adapters merged into the weights.

        Raises:
            ConfigError: `output` is no place for it.
            OSError: it cannot be written.
        """
