"""Averages of the adapters' parameters over the steps.

If a run has averages, its validation, previews and adapter files use them instead of the
parameters.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import trainable_candle as tc
from trainable_candle.errors import Error, WeightsFormatError
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.state import read_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.trainer import StepReport, Trainer

_FILE: Final = "average.safetensors"
"""The file of the averages in a checkpoint."""


class Average(Protocol):
    """An average of the parameters over the steps."""

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters have the values of the averages."""

    def keep(self) -> None:
        """Replace the parameters by the averages."""


class OptimizerAverage:
    """The average that an optimizer keeps itself (`tc.optim.AdamWScheduleFree`)."""

    def __init__(self, optimizer: tc.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the parameters have the values of the averages."""
        # `eval` sets the parameters to the averages; `train` restores them.
        self._optimizer.eval()
        try:
            yield
        finally:
            self._optimizer.train()

    def keep(self) -> None:
        """Replace the parameters by the averages."""
        self._optimizer.eval()


class AdapterAverage(Callback):
    """The moving average of every adapter (`tc.optim.EMA`), updated after every step.

    Args:
        adapters: the trained adapters.
        decay: the factor of the old average in each update, above 0 and below 1.
    """

    def __init__(self, adapters: Adapters, decay: float) -> None:
        self._adapters = adapters
        self._decay = decay
        self._averages = self._fresh()

    def _fresh(self) -> dict[str, tc.optim.EMA]:
        """Return averages that start at the present parameters."""
        sets = self._adapters.sets.items()
        return {component: tc.optim.EMA(adapter, self._decay) for component, adapter in sets}

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Move the averages towards the parameters."""
        for average in self._averages.values():
            average.update()

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        """Write the averages to a checkpoint."""
        tensors = {
            f"{component}:{name}": tensor
            for component, average in self._averages.items()
            for name, tensor in average.state_dict().items()
        }
        trainer.write_later(partial(tc.save_file, tensors, folder / _FILE))

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Load the averages of a checkpoint.

        If the checkpoint has no averages, they start at the checkpoint's parameters.

        Raises:
            WeightsFormatError: the file is damaged, or has the averages of another adapter.
        """
        path = folder / _FILE
        if not path.exists():
            self._averages = self._fresh()
            return
        stored = read_tensors(folder, _FILE)
        try:
            for component, average in self._averages.items():
                prefix = f"{component}:"
                average.load_state_dict(
                    {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
                )
        except Error as error:
            raise WeightsFormatError(
                f"resume: {folder} has the averages of another adapter: {error}; resume with the "
                "settings that the run was started with"
            ) from error

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the parameters have the values of the averages."""
        with ExitStack() as swapped:
            self._swap_in(swapped)
            yield

    def keep(self) -> None:
        """Set all parameters to their averages; if setting one fails, none changes."""
        with ExitStack() as swapped:
            self._swap_in(swapped)
            # Forget how to restore the parameters, so that they keep the averages.
            swapped.pop_all()

    def _swap_in(self, swapped: ExitStack) -> None:
        """Set the parameters to their averages; the exit of `swapped` restores them."""
        for average in self._averages.values():
            swapped.enter_context(average)  # swaps in; its exit swaps out
