"""`LatentFamily`: a `LatentModel` with what `--model` needs to find and train it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from trainable_candle.tasks.latent.model import LatentModel
from trainable_candle.tasks.latent.task import LatentTask

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.settings import TrainConfig


class LatentFamily(LatentModel):
    """A family of models that generate latents; `--model` selects the family by its name."""

    summary: ClassVar[str]
    """A description of the family in one line."""
    download: ClassVar[str] = ""
    """Where to get weights if the package has none, with their size and licence."""

    @classmethod
    def default_weights(cls) -> Path | None:
        """Return the path of the family's weights in the package; None if there are none."""
        return None

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:  # noqa: ARG003
        """Return default values by the names of settings, for use where `config` has None."""
        return {"learning_rate": 1e-4}

    def task(self) -> LatentTask:
        """Return the task that trains this model and draws with it."""
        return LatentTask(self)
