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


class WandbLog(Callback):
    """Logs the values of `JsonLog` to a run of a wandb project: `train/...` and `validation/...`.

    Resumed training continues the same wandb run. wandb sends the values to its server, unless
    wandb's configuration forbids that, for example by `WANDB_MODE=offline` in the environment.

    Args:
        project: the name of the project.
        name: the name of the wandb run.
        folder: the output folder, for wandb's files and the id of the wandb run.
        every: steps between two points of a `train/...` curve; the last step has a point, unless
            the run ends early.

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
        self._facts = {"project": project, "name": name}
        self._folder = folder
        self._every = every
        self._run: Any = None

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        """Start a wandb run; resumed training continues the one whose id is in the folder."""
        path = self._folder / _ID
        known = path.read_text(encoding="utf-8").strip() if trainer.step and path.exists() else None
        self._run = self._wandb.init(
            **self._facts,
            config=dict(trainer.settings),
            dir=str(self._folder),
            id=known,
            resume="allow" if known else None,
        )
        write_atomically(path, f"{self._run.id}\n")

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Log the step."""
        if is_logged(trainer, report, self._every):
            values = {f"train/{name}": value for name, value in scalars(report).items()}
            self._run.log(values, step=report.step)

    def on_metrics(self, trainer: Trainer[Any], metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        values = {name.replace("_", "/", 1): value for name, value in metrics.items()}
        self._run.log(values, step=trainer.step)

    def on_train_end(self, trainer: Trainer[Any]) -> None:  # noqa: ARG002
        """End the wandb run."""
        if self._run is not None:
            self._run.finish()
