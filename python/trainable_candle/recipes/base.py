"""What a model must say about itself to be trained and sampled from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import Tensor
    from trainable_candle.data import Picture
    from trainable_candle.models import Model
    from trainable_candle.train.config import TrainConfig


class Prepared(Protocol):
    """A data set in the form that the model trains on."""

    def loss(self, batch: npt.NDArray[np.int64]) -> Tensor:
        """The training loss on the items of these numbers, a single element.

        Whatever is random comes from the library's generator, so that a resumed run repeats it.
        """

    def __len__(self) -> int:
        """The number of items."""


class Recipe(Protocol):
    """One loaded model with everything around it."""

    summary: ClassVar[str]
    """What the model is, in a line."""

    default_targets: ClassVar[tuple[str, ...]]
    """Layers that an adapter sits on unless the user names others."""

    @property
    def model(self) -> Model:
        """The loaded model."""

    @classmethod
    def default_weights(cls) -> Path | None:
        """The weights that the package ships, if it ships any."""

    @classmethod
    def load(cls, weights: str | Path, dtype: str, device: str) -> Self:
        """Load the model.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: the files are missing, damaged, or of
                another model.
        """

    def prepare(self, pictures: Sequence[Picture], config: TrainConfig) -> Prepared:
        """Turn pictures and captions into what the model trains on.

        Raises:
            DatasetError: a picture or a caption does not suit the model.
        """

    def sample(self, prompts: Sequence[str], *, steps: int, seed: int) -> npt.NDArray[np.uint8]:
        """One picture a prompt; shape (n, height, width, 3).

        The library's generator is left as it was.

        Raises:
            ConfigError: a prompt does not suit the model.
        """
