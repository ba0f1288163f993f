"""The interfaces of tasks and families, through which the command line trains models."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from trainable_candle.distributed.group import ALONE
from trainable_candle.draws import generator
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.train.source import BatchSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.distributed.group import Group as Processes
    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.tasks.estimate import Estimate
    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.trainer import Inputs

BatchT = TypeVar("BatchT")
BatchOut = TypeVar("BatchOut", covariant=True)
DataT = TypeVar("DataT", covariant=True)


@dataclass(frozen=True)
class Split(Generic[DataT]):
    """The data for training, and the data for validation if there are any."""

    train: DataT
    validation: DataT | None = None


@contextmanager
def naming_validation() -> Iterator[None]:
    """Return a context that turns `dataset: ` at the start of errors to `validation_dataset: `."""
    try:
        yield
    except (ConfigError, DatasetError) as error:
        text = str(error)
        if not text.startswith("dataset: "):
            raise
        raise type(error)(f"validation_{text}") from None


def held_out_items(count: int, share: float, seed: int, noun: str = "image") -> list[int]:
    """Return the sorted indices of the items that are held out for validation.

    Args:
        count: the number of all items.
        share: the share of the items to hold out. At least one is held out, and not all are.
        seed: the seed of the random choice.
        noun: the word for one item in messages.

    Raises:
        DatasetError: there are fewer than two items.
    """
    if count < 2:
        raise DatasetError(
            f"dataset: {count} {noun} cannot be split into training and validation; "
            "leave validation_split out, or give validation_dataset"
        )
    held_out = min(max(1, round(count * share)), count - 1)
    order = generator(seed, "split").permutation(count)
    return sorted(int(index) for index in order[:held_out])


class EpochSource(BatchSource[BatchOut], Protocol[BatchOut]):
    """Batches by number; each epoch is a range of consecutive numbers."""

    def first_batch(self, epoch: int) -> int:
        """Return the number of an epoch's first batch; batches and epochs count from 0."""


class Prepared(Protocol[BatchT]):
    """A data set in the form that the model trains on."""

    def batches(self, batch_size: int) -> EpochSource[BatchT]:
        """Return shuffled batches for training."""

    def inputs(self, batch: BatchT) -> Inputs:
        """Return the inputs of `loss` for a batch, by name, on the model's device.

        Random numbers are drawn on the host, and depend only on the run's seed and the number of
        each sample (`draws`). So a resumed run draws the numbers of an uninterrupted run, and a run
        on a GPU draws the numbers of a run on the CPU.
        """

    def weight(self, batch: BatchT) -> float:
        """Return the weight of a batch's loss in the mean over the batches of a step, above 0."""

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the loss for `inputs`, one element, without waiting for the device."""

    def validation_loss(self) -> float:
        """Return the mean loss over all data, with the same random numbers at every call.

        If there are several processes, all must call this method: each measures a part of the data,
        and all get the same result. The library's generator does not change.
        """

    def count(self, batch: BatchT) -> float:
        """Return the number of images or tokens of a batch, for reports of speed."""

    def metadata(self) -> Mapping[str, str]:
        """Return metadata about the data for adapter files; most names are from kohya's scripts."""

    def validation_facts(self, loss: float) -> Mapping[str, float]:
        """Return the values to log after a validation, by name.

        They include `loss`, the result of `validation_loss`. All processes must call this method.
        """

    def __len__(self) -> int:
        """Return the number of examples."""


class Task(Protocol):
    """One model with its data, its loss and its previews.

    A run calls `check`, `read`, `samples`, `estimate`, `prepare` and `attach` in this order. During
    training it calls `preview` and `adapter_file`, and after training `adapter_file` and `publish`.
    `load_adapter`, `loss_on` and `save_merged` are for a model outside of a run. A run loads no
    weights before `prepare`.
    """

    noun: ClassVar[str]
    """The word for an example of the task's data in messages."""
    counts: ClassVar[str]
    """The unit of `Prepared.count`: `image` or `token`."""
    weighs_batches: ClassVar[bool]
    """Whether the mean over the batches of a step weighs them by `Prepared.weight`; if not, they
    weigh the same."""

    @property
    def repeats(self) -> bool:
        """Whether steps with batches of equal shapes launch the same operations on the device.

        CUDA graphs require this. It has nothing to do with the `repeats` of a folder of images.
        """

    def check(self, report: Callable[[str], None]) -> None:
        """Check the settings against the model, before any weights or data are read.

        `report` gets notes for the user.

        Raises:
            ConfigError, ArgumentError: a value is outside its range or does not suit the model.
            MissingFileError, WeightsFormatError: the weights, or the initial adapter, are missing,
                damaged, or of another model.
        """

    def read(self, report: Callable[[str], None]) -> Split[Any]:
        """Find and check the data.

        `report` gets a summary of them.

        Raises:
            DatasetError: an example does not suit the model, or there is none.
            ConfigError: settings contradict each other, or have no effect on the data.
        """

    def samples(self, data: Split[Any]) -> int:
        """Return the number of samples in an epoch of the training data.

        Args:
            data: the result of `read`.
        """

    def estimate(self, config: TrainConfig, data: Split[Any], limit: float) -> Estimate:
        """Estimate the memory of a run, from the headers of the files alone.

        Args:
            config: the settings, which may differ from the task's own.
            data: the result of `read`.
            limit: available memory, bytes; the more there is, the larger are the batches that are
                encoded.

        Raises:
            MissingFileError, WeightsFormatError: the files are missing, damaged, or of another
                model.
        """

    def prepare(
        self, data: Split[Any], report: Callable[[str], None], group: Processes = ALONE
    ) -> Split[Prepared[Any]]:
        """Turn data into the form that the model trains on, and free what training does not need.

        Args:
            data: the result of `read`.
            report: gets a line for each long operation.
            group: the processes that encode and validate together; all must call this method.

        Raises:
            DatasetError: an example cannot be read any more.
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """

    def attach(self, fresh: bool = True) -> Adapters:
        """Attach trainable adapters to the model and set its checkpointing, as the settings say.

        Args:
            fresh: whether to initialise the adapters as the setting `init` says. This is not needed
                if a checkpoint is loaded afterwards.

        Raises:
            ConfigError: a target matches no layer.
        """

    def preview(self, path: Path) -> Path:
        """Make the preview that the settings describe, and write it to a file.

        The file's path is `path` plus a suitable extension. The library's generator does not
        change.

        Returns:
            The path with the extension.

        Raises:
            NonFiniteError: the model's output has a NaN or an infinity.
            OSError: the file cannot be written.
        """

    def adapter_file(self, adapters: Adapters, path: Path, metadata: dict[str, str]) -> AdapterFile:
        """Return a snapshot of the adapters for one file at `path`, which is written later.

        Raises:
            ArgumentError: the file format that the settings name cannot represent these adapters.
        """

    def publish(self, adapters: Adapters, output: Path, metadata: dict[str, str]) -> Path | None:
        """Write the finished adapters for tools that do not read the file of `adapter_file`.

        Args:
            adapters: the adapters with their final values.
            output: the folder of the run.
            metadata: text entries for the header of the weights' file.

        Returns:
            The file or folder that was written; None if none.

        Raises:
            OSError: a file cannot be written.
        """

    def load_adapter(self, path: Path, scale: float) -> Adapters:
        """Attach the adapters in a file to the model; `scale` multiplies their effect.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the file is missing, damaged, or of
                another model.
        """

    def loss_on(self, dataset: str) -> float:
        """Return the mean loss on a data set, with the adapters if there are any.

        `dataset` is a value of the setting of this name.

        Raises:
            DatasetError: the data set cannot be used.
        """

    def save_merged(self, output: Path) -> None:
        """Write all parts of the model, with the adapters merged into the weights.

        Raises:
            ConfigError: `output` exists and is not an empty folder, or it is a file where a folder
                is needed, or the reverse.
            OSError: the model cannot be written.
        """


class Family(Protocol):
    """A family of models: `--model` gives its name, and its `task` trains its models."""

    name: ClassVar[str]
    """The family's name for `--model`."""
    summary: ClassVar[str]
    """A description of the family in one line."""
    download: ClassVar[str]
    """Where to get weights that are not in the package, with their size and licence; empty if the
    package has weights."""
    groups: ClassVar[tuple[type[Group], ...]]
    """The groups of settings that the family takes; a setting of another group is an error."""
    parts: ClassVar[tuple[str, ...]]
    """The subfolders of a pipeline's folder, one for each model; empty if the family's weights are
    not a pipeline."""

    def __init__(
        self, weights: Path, dtype: str | None, device: str, config: TrainConfig | None = None
    ) -> None: ...

    @classmethod
    def default_weights(cls) -> Path | None:
        """Return the path of the family's weights in the package; None if there are none."""

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:
        """Return the model's defaults by name of the setting.

        The caller uses a default only for a setting that has no value in `config`.
        """

    def require_own(self) -> None:
        """Check that the weights are of this family.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """

    def task(self) -> Task:
        """Return the task that trains this model."""
