"""The log of a run for Weights & Biases."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.files import write_atomically
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.logs import is_logged, scalars

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.train.trainer import StepReport, Trainer

_ID: Final = "wandb-id.txt"
"""The file with the id of the wandb run."""


class WandbLog(Callback):
    """Logs the values of `JsonLog`, such as the loss of a step, to a run of a wandb project.

    The names of a step's values are `train/...`; those of metrics are `validation/...` and so on.
    Resumed training continues the same wandb run. wandb sends the values to its server, unless
    wandb's configuration forbids that, for example by `WANDB_MODE=offline` in the environment.

    Args:
        project: the name of the project.
        name: the name of the wandb run.
        folder: the output folder, which gets wandb's files and the id of the wandb run.
        every: the number of steps from one point of a `train/...` curve to the next; the last step
            has a point too, unless the run ends early.

    Raises:
        ModuleNotFoundError: wandb is not installed; the message says how to install it.
    """

    def __init__(
        self,
        project: str,
        name: str,
        folder: Path,
        every: int = 1,
    ) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'wandb: the package is not installed; run: pip install "trainable-candle[wandb]"',
                name=error.name,
            ) from error
        self._labels = {"project": project, "name": name}
        self._folder = folder
        self._every = every
        self._run: Any = None

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Start a wandb run; resumed training continues the one whose id is in the folder."""
        path = self._folder / _ID
        # A run at step 0 is new, even if the folder has the id of an earlier run.
        resumes = trainer.step and path.exists()
        known_id = path.read_text(encoding="utf-8").strip() if resumes else None
        self._run = self._wandb.init(
            **self._labels,
            config=dict(trainer.settings),
            dir=str(self._folder),
            id=known_id,
            # "allow" continues the wandb run, or starts one with this id if there is none.
            resume="allow" if known_id else None,
        )
        write_atomically(path, f"{self._run.id}\n")

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Log the values of the step if the step is logged."""
        if is_logged(trainer, report, self._every):
            values = {f"train/{name}": value for name, value in scalars(report).items()}
            self._run.log(values, step=report.step)

    def on_metrics(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        # wandb groups by the word before the slash: `validation_loss` is in the group `validation`.
        values = {name.replace("_", "/", 1): value for name, value in metrics.items()}
        self._run.log(values, step=trainer.step)

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """End the wandb run."""
        if self._run is not None:
            self._run.finish()
