"""`LatentFamily`: what `--model` finds, a latent model and the task that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from trainable_candle.tasks.latent.model import LatentModel
from trainable_candle.tasks.latent.task import LatentTask

if TYPE_CHECKING:
    from pathlib import Path


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

    def task(self) -> LatentTask:
        """The task that trains this model and draws with it."""
        return LatentTask(self)
