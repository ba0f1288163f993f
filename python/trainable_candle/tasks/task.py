"""What a task says about itself, so that it can be trained from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from trainable_candle.distributed.group import ALONE
from trainable_candle.draws import generator
from trainable_candle.errors import DatasetError
from trainable_candle.train.source import BatchSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.distributed.group import Group as Processes
    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.tasks.estimate import Estimate
    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.trainer import Inputs

BatchT = TypeVar("BatchT")
BatchOut = TypeVar("BatchOut", covariant=True)
PartT = TypeVar("PartT", covariant=True)


@dataclass(frozen=True)
class Split(Generic[PartT]):
    """What is trained on, and what the training is validated on."""

    train: PartT
    validation: PartT | None = None


def held_out_items(count: int, share: float, seed: int, noun: str = "image") -> list[int]:
    """Indices held out for validation: fixed by the seed, at least one, never all.

    Raises:
        DatasetError: there is only one item.
    """
    if count < 2:
        raise DatasetError(
            f"dataset: {count} {noun} cannot be split into training and validation; "
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

    def batches(self, batch_size: int) -> EpochSource[BatchT]:
        """Shuffled batches for training."""

    def inputs(self, batch: BatchT) -> Inputs:
        """What the loss of a batch is computed from, by name, on the model's device.

        Whatever is random is drawn on the host from streams of the run's seed and the samples'
        numbers (`draws`): a resumed run repeats it, and a run on a GPU sees what one on the CPU
        would.
        """

    def weight(self, batch: BatchT) -> float:
        """How much the loss of a batch counts beside those of others in a step, above 0."""

    def loss(self, inputs: Inputs) -> Tensor:
        """The training loss for `inputs`, one element, made without synchronization."""

    def validation_loss(self) -> float:
        """The mean loss over everything, with the same random numbers at every call.

        Of several processes each measures a part; all call this, and have the same result. The
        library's generator is left as it was.
        """

    def count(self, batch: BatchT) -> float:
        """The number of images or tokens of a batch, for reports of speed."""

    def metadata(self) -> Mapping[str, str]:
        """The metadata of adapter files about the data, under the names of kohya's scripts."""

    def validation_facts(self, loss: float) -> Mapping[str, float]:
        """What is logged of a validation whose loss is `loss`, that included, by name.

        Shared out as `validation_loss`.
        """

    def __len__(self) -> int:
        """The number of examples."""


class Task(Protocol):
    """One model with its data, its loss and its previews.

    The methods are called in this order; nothing is loaded before `prepare`.
    """

    noun: ClassVar[str]
    """What an example of its data is called in messages."""
    counts: ClassVar[str]
    """What `Prepared.count` counts: `image` or `token`."""
    weighs: ClassVar[bool]
    """Whether batches count in a step by their `Prepared.weight`, and not equally."""

    @property
    def repeats(self) -> bool:
        """Whether a pass does the same for all batches of a shape, as CUDA graphs need it."""

    def check(self, report: Callable[[str], None]) -> None:
        """Check the settings against the headers of the weights; nothing else is read yet.

        Raises:
            ConfigError, ArgumentError: a value is outside its range or does not suit the model.
            MissingFileError, WeightsFormatError: the weights, or the initial adapter, are missing,
                damaged, or of another model.
        """

    def read(self, report: Callable[[str], None]) -> Split[Any]:
        """Find and check the data.

        Raises:
            DatasetError: an example does not suit the model, or there is none.
        """

    def samples(self, data: Split[Any]) -> int:
        """How many samples a pass over the training data has, of which batches are made.

        Args:
            data: what `read` found.
        """

    def estimate(self, config: TrainConfig, data: Split[Any], limit: float) -> Estimate:
        """What a run will hold in memory, from the headers of the files alone.

        Args:
            config: the settings, which may be others than those of the task.
            data: what `read` found.
            limit: available memory, bytes; larger batches are encoded where there is more.

        Raises:
            MissingFileError, WeightsFormatError: the files are missing, damaged, or of another
                model.
        """

    def prepare(
        self, data: Split[Any], report: Callable[[str], None], group: Processes = ALONE
    ) -> Split[Prepared[Any]]:
        """Turn what `read` found into what the model trains on, and drop what served only for that.

        Args:
            data: from `read`.
            report: gets a line for what takes long.
            group: the processes that encode and validate together; all call this.

        Raises:
            DatasetError: an example cannot be read any more.
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """

    def attach(self, fresh: bool = True) -> Adapters:
        """Put trainable adapters on the model, and set its checkpointing, as the settings say.

        Args:
            fresh: whether they start as the settings say; they take the values of a checkpoint
                otherwise.

        Raises:
            ConfigError: a target matches no layer.
        """

    def preview(self, path: Path) -> Path:
        """Write a preview, as the settings say, to `path` plus a suitable extension.

        The library's generator is left as it was.

        Returns:
            The file.

        Raises:
            NonFiniteError: the model gives no finite numbers.
            OSError: the file cannot be written.
        """

    def adapter_file(self, adapters: Adapters, path: Path, metadata: dict[str, str]) -> AdapterFile:
        """The present values of the adapters for one file, which is written later.

        Raises:
            ArgumentError: the format of the settings cannot hold these adapters.
        """

    def publish(self, adapters: Adapters, output: Path, metadata: dict[str, str]) -> Path | None:
        """Write the finished adapters as other tools expect them, if `adapter_file` is not that.

        Args:
            adapters: with their final values.
            output: the folder of the run.
            metadata: text entries for the header of a file.

        Returns:
            What was written.

        Raises:
            OSError: it cannot be written.
        """

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Put the adapters of a file on the model, their effect times `scale`.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """

    def loss_on(self, dataset: str) -> float:
        """The mean loss on a data set, with the adapters if there are any.

        Raises:
            DatasetError: it cannot be used.
        """

    def save_merged(self, output: Path) -> None:
        """Write the whole model with its adapters merged into the weights.

        Raises:
            ConfigError: `output` is not a place for it.
            OSError: it cannot be written.
        """


class Family(Protocol):
    """Models that one task trains: that `--model NAME` names."""

    name: ClassVar[str]
    """What `--model` calls it."""
    summary: ClassVar[str]
    """What the family is, in a line."""
    download: ClassVar[str]
    """Where its weights are had if none are built in, how large they are, under which licence."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that it takes; to give others is an error."""
    parts: ClassVar[tuple[str, ...]]
    """The folders of its models in a pipeline; none if it is not a pipeline."""

    def __init__(
        self, weights: Path, dtype: str | None, device: str, config: TrainConfig | None = None
    ) -> None: ...

    @classmethod
    def default_weights(cls) -> Path | None:
        """The weights that the package ships, if it ships any."""

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:
        """What settings are that have no value of their own, by name."""

    def require_own(self) -> None:
        """Check that the weights are of this family.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: they are missing, damaged, or of
                another model.
        """

    def task(self) -> Task:
        """What trains this model."""
