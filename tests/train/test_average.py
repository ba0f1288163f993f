"""The running average of the adapters in a run."""

from typing import Any

import pytest

from trainable_candle.errors import OutOfMemoryError
from trainable_candle.train.ema import AdapterAverage


class Average:
    """A stand-in for `tc.optim.EMA`. If `full`, its `swap_in` raises an out-of-memory error."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.is_swapped_in = False

    def swap_in(self) -> None:
        if self.full:
            raise OutOfMemoryError("EMA: the GPU has no memory left")
        self.is_swapped_in = True

    def swap_out(self) -> None:
        self.is_swapped_in = False

    def __enter__(self) -> None:
        self.swap_in()

    def __exit__(self, *_: object) -> None:
        self.swap_out()


class NoAdapters:
    sets: dict[str, Any] = {}  # noqa: RUF012


def averages(*members: Average) -> AdapterAverage:
    average = AdapterAverage(NoAdapters(), 0.99)  # type: ignore[arg-type]
    average._averages = {str(i): member for i, member in enumerate(members)}  # type: ignore[misc]
    return average


def test_all_averages_are_applied_or_none() -> None:
    members = [Average(), Average(full=True), Average()]
    average = averages(*members)
    with pytest.raises(OutOfMemoryError), average.applied():
        raise AssertionError("the context was entered although one average failed to swap in")
    assert [m.is_swapped_in for m in members] == [False] * 3
    with pytest.raises(OutOfMemoryError):
        average.keep()
    assert [m.is_swapped_in for m in members] == [False] * 3


def test_an_error_within_the_context_restores_the_parameters() -> None:
    members = [Average(), Average()]
    average = averages(*members)

    def fail_within() -> None:
        with average.applied():
            assert [m.is_swapped_in for m in members] == [True] * 2
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail_within()
    assert [m.is_swapped_in for m in members] == [False] * 2
    average.keep()
    assert [m.is_swapped_in for m in members] == [True] * 2
