"""What a task says about itself, so that it can be trained from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from trainable_candle.draws import generator
from trainable_candle.errors import DatasetError
from trainable_candle.train.trainer import BatchSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainable_candle import AdapterFile, Tensor
    from trainable_candle.settings import TrainConfig
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


def held_out_items(count: int, share: float, seed: int) -> list[int]:
    """Indices held out for validation: fixed by the seed, at least one, never all.

    Raises:
        DatasetError: there is only one item.
    """
    if count < 2:
        raise DatasetError(
            f"dataset: {count} image cannot be split into training and validation; "
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

    def loss(self, inputs: Inputs) -> Tensor:
        """The training loss for `inputs`, one element, made without synchronization."""

    def validation_loss(self) -> float:
        """The mean loss over everything, with the same random numbers at every call.

        The library's generator is left as it was.
        """

    def __len__(self) -> int:
        """The number of examples."""


class Task(Protocol):
    """One model with its data, its loss and its previews.

    The methods are called in this order; nothing is loaded before `prepare`.
    """

    def check(self, report: Callable[[str], None]) -> None:
        """Check the settings against the headers of the weights; nothing else is read yet.

        Raises:
            ConfigError, ArgumentError: a value lies outside its range or does not suit the model.
            MissingFileError, WeightsFormatError: the weights, or the initial adapter, are missing,
                damaged, or of another model.
        """

    def read(self, report: Callable[[str], None]) -> Split[Any]:
        """Find and check the data.

        Raises:
            DatasetError: an example does not suit the model, or there is none.
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

    def prepare(self, data: Split[Any], report: Callable[[str], None]) -> Split[Prepared[Any]]:
        """Turn what `read` found into what the model trains on, and drop what served only for that.

        Raises:
            DatasetError: an example cannot be read any more.
            MissingFileError, WeightsFormatError, ConfigError: the weights are missing, damaged, or
                of another model.
        """

    def attach(self) -> Adapters:
        """Put trainable adapters on the model, and set its checkpointing, as the settings say.

        Raises:
            ConfigError: a target matches no layer.
        """

    def preview(self, path: Path) -> None:
        """Write a preview, as the settings say, to `path` plus a suitable extension.

        The library's generator is left as it was.

        Raises:
            NonFiniteError: the model gives no finite numbers.
            OSError: the file cannot be written.
        """

    def adapter_file(self, adapters: Adapters, path: Path, metadata: dict[str, str]) -> AdapterFile:
        """The present values of the adapters for one file, which is written later.

        Raises:
            ArgumentError: the format of the settings cannot hold these adapters.
        """
