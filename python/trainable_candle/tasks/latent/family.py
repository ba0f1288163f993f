"""`LatentFamily`: what `--model` finds, a latent model and the task that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from trainable_candle.tasks.latent.model import LatentModel
from trainable_candle.tasks.latent.task import LatentTask

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.settings import TrainConfig


class LatentFamily(LatentModel):
    """A family of latent models, by its name on the command line."""

    summary: ClassVar[str]
    """What the family is, in a line."""
    download: ClassVar[str] = ""
    """Where to get its weights if the package ships none, how large they are, and their licence."""

    @classmethod
    def default_weights(cls) -> Path | None:
        """The weights that the package ships, if it ships any."""
        return None

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:  # noqa: ARG003
        """What settings are that have no value of their own, by name."""
        return {"learning_rate": 1e-4}

    def task(self) -> LatentTask:
        """The task that trains this model and draws with it."""
        return LatentTask(self)
