"""The moving averages of a run's adapters are swapped in and out together."""

from typing import Any

import pytest

from trainable_candle.errors import OutOfMemoryError
from trainable_candle.train.ema import AdapterAverage


class FakeEMA:
    """A stand-in for `tc.optim.EMA`. If `fails`, `swap_in` raises an out-of-memory error."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.is_swapped_in = False

    def swap_in(self) -> None:
        if self.fails:
            raise OutOfMemoryError("EMA: the GPU has no memory left")
        self.is_swapped_in = True

    def swap_out(self) -> None:
        self.is_swapped_in = False

    def __enter__(self) -> None:
        self.swap_in()

    def __exit__(self, *_: object) -> None:
        self.swap_out()


class NoAdapters:
    """A stand-in for the adapters of a run without any."""

    sets: dict[str, Any] = {}  # noqa: RUF012


def average_of(*members: FakeEMA) -> AdapterAverage:
    """Return an average that consists of `members`."""
    # The decay, 0.99, has no effect here: nothing updates the averages.
    average = AdapterAverage(NoAdapters(), 0.99)  # type: ignore[arg-type]
    average._averages = {str(i): member for i, member in enumerate(members)}  # type: ignore[misc]
    return average


def test_if_one_average_cannot_be_swapped_in_none_is() -> None:
    members = [FakeEMA(), FakeEMA(fails=True), FakeEMA()]
    average = average_of(*members)
    with pytest.raises(OutOfMemoryError), average.applied():
        raise AssertionError("the context was entered although one average failed to swap in")
    assert [m.is_swapped_in for m in members] == [False] * 3
    # `keep` swaps the averages in for good.
    with pytest.raises(OutOfMemoryError):
        average.keep()
    assert [m.is_swapped_in for m in members] == [False] * 3


def test_an_error_within_the_context_swaps_the_averages_out() -> None:
    members = [FakeEMA(), FakeEMA()]
    average = average_of(*members)

    def fail_within() -> None:
        with average.applied():
            assert [m.is_swapped_in for m in members] == [True] * 2
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail_within()
    assert [m.is_swapped_in for m in members] == [False] * 2
    average.keep()
    assert [m.is_swapped_in for m in members] == [True] * 2
