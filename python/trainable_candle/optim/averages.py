"""`VariableEMA`, the moving averages of any variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from trainable_candle import _core
from trainable_candle._explained import explained
from trainable_candle._grad_mode import no_grad
from trainable_candle.errors import ArgumentError, ConfigError, ShapeError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from trainable_candle._core import Tensor, Var

__all__ = ["VariableEMA"]


class VariableEMA:
    """The exponential moving averages of variables, in f32; for an adapter, see `EMA`.

    Call `update` after each step of the optimizer. Inside a `with` block of this object, each
    variable holds its average; after the block it holds its trained value again.

        ema = tc.optim.VariableEMA(model.parameters(), decay=0.999)
        loss.backward()
        optimizer.step()
        ema.update()
        with ema:
            prediction = model(x)

    Args:
        variables: The variables, or a mapping of names to variables.
        decay: The weight of the old average in each update, in [0, 1).
        warmup: If True, the weight in the update after n earlier ones is
            min(decay, (1 + n) / (10 + n)): the first update keeps a tenth of the initial values,
            and the weight reaches a `decay` of 0.999 after 8990 updates. torch's
            `get_ema_multi_avg_fn` has no such warm-up.

    Raises:
        ArgumentError: If the decay is out of range, or there is no variable.
        TypeError: If an item is not a variable.
    """

    @explained
    def __init__(
        self,
        variables: Iterable[Var] | Mapping[str, Var],
        decay: float = 0.999,
        warmup: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ArgumentError(f"VariableEMA: decay is {decay}, expected at least 0 and below 1")
        items = variables.values() if isinstance(variables, Mapping) else variables
        self._variables: list[Var] = []
        for index, variable in enumerate(cast("Iterable[object]", items)):
            if not isinstance(variable, _core.Var):
                kind = type(variable).__name__
                raise TypeError(f"VariableEMA: variable {index} is {kind}, expected a Var")
            self._variables.append(variable)
        if not self._variables:
            raise ArgumentError("VariableEMA: expected at least one variable")
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self._averages = [_copy(v).to("f32") for v in self._variables]
        self._trained: list[Tensor] | None = None

    @property
    def averages(self) -> list[Tensor]:
        """The averages, in the order of the variables."""
        return list(self._averages)

    def update(self) -> None:
        """Update the averages with the variables' values.

        Raises:
            ArgumentError: If called inside a `with` block, where the variables hold the averages.
        """
        if self._trained is not None:
            raise ArgumentError(
                "VariableEMA: the variables hold the averages; leave the `with` block first"
            )
        limit = (1 + self.updates) / (10 + self.updates)
        decay = min(self.decay, limit) if self.warmup else self.decay
        self.updates += 1
        with no_grad():
            self._averages = [
                average * decay + variable.detach().to("f32") * (1 - decay)
                for average, variable in zip(self._averages, self._variables, strict=True)
            ]

    def __enter__(self) -> Self:
        """Set the variables to the averages.

        Raises:
            ArgumentError: If the variables already hold the averages.
        """
        if self._trained is not None:
            raise ArgumentError(
                "VariableEMA: the variables hold the averages already; do not nest `with` blocks"
            )
        self._trained = [_copy(v) for v in self._variables]
        self._set_variables(self._averages)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Set the variables to the trained values that they had before the `with` block."""
        # `__enter__` has set `_trained`; only its type allows None.
        trained, self._trained = self._trained, None
        self._set_variables(trained or [])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages and the number of updates, on the CPU.

        `INDEX.average` (f32) is the average of the variable with the index INDEX, `updates` (i64)
        the number of updates.
        """
        averages = {f"{index}.average": a.to("cpu") for index, a in enumerate(self._averages)}
        return {**averages, "updates": _core.tensor(self.updates)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a `state_dict` whose averages have the shapes of these variables.

        Raises:
            ConfigError: If an entry is missing or not expected. In this case nothing changes.
            ShapeError: If an entry has another shape. In this case nothing changes.
        """
        expected = self.state_dict()
        if state.keys() != expected.keys():
            wrong = sorted(state.keys() ^ expected.keys())
            raise ConfigError(f"VariableEMA: entries {wrong} are missing or not expected")
        for name, value in expected.items():
            if state[name].shape != value.shape:
                raise ShapeError(
                    f"VariableEMA: {name} has shape {state[name].shape}, expected {value.shape}"
                )
        self.updates = int(state["updates"].item())
        self._averages = [
            state[f"{index}.average"].to("f32").to(average.device)
            for index, average in enumerate(self._averages)
        ]

    def _set_variables(self, values: list[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.set(value.to(variable.dtype))


def _copy(variable: Var) -> Tensor:
    """Return a copy of the variable's value, so that later steps do not change the result."""
    return variable.detach() * 1  # detach() alone would share the variable's memory
