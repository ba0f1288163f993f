"""A running average of the adapter, which is what is validated, drawn and saved when it is kept."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import Error, WeightsFormatError
from trainable_candle.train.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from trainable_candle import Tensor, Var
    from trainable_candle.train.trainer import StepReport, Trainer

_FILE: Final = "average.safetensors"


class AdapterAverage(Callback):
    """An exponential moving average of variables, updated after every step.

    The decay of step n is the smaller of `decay` and (1 + n) / (10 + n), so that the start, when
    the adapter is still nothing, is soon forgotten (as in TensorFlow's ExponentialMovingAverage).

    Args:
        parameters: the variables by name.
        decay: above 0 and below 1.
    """

    def __init__(self, parameters: Mapping[str, Var], decay: float) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self._averages = _copies(self._parameters)

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Move the averages towards the parameters."""
        share = 1.0 - min(self._decay, (1 + report.step) / (10 + report.step))
        for name, var in self._parameters.items():
            average = self._averages[name]
            self._averages[name] = average + (var.detach() - average) * share

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Put the averages into a checkpoint."""
        tc.save_file(self._averages, folder / _FILE)

    def on_resume(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        """Take the averages of a checkpoint; of one without, start at its parameters."""
        if not (folder / _FILE).exists():
            self._averages = _copies(self._parameters)
            return
        try:
            stored = tc.load_file(folder / _FILE)
        except Error as error:
            raise WeightsFormatError(f"resume: {folder} is damaged: {error}") from error
        if stored.keys() != self._averages.keys():
            raise WeightsFormatError(
                f"resume: {folder / _FILE} holds averages of other parameters than this run trains"
            )
        self._averages = {
            name: stored[name].to(var.device) for name, var in self._parameters.items()
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the variables hold their averages, afterwards what they held."""
        present = _copies(self._parameters)
        self.keep()
        try:
            yield
        finally:
            for name, var in self._parameters.items():
                var.set(present[name])

    def keep(self) -> None:
        """Set the variables to their averages."""
        for name, var in self._parameters.items():
            var.set(self._averages[name])


def _copies(parameters: Mapping[str, Var]) -> dict[str, Tensor]:
    """The values of variables; `detach` would follow what the variables are set to."""
    return {name: var.make_var().detach() for name, var in parameters.items()}
