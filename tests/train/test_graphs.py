"""Which forward and backward passes become graphs, and which graphs are kept, without a GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.train import Trainer
from trainable_candle.train.graphs import PassGraphs

Inputs = Mapping[str, tc.Tensor]


class Recordings:
    """A stand-in for `tc.cuda.capture`.

    `made` has the input shapes of each captured graph, and `calls` has the number of the graph of
    each call. If `full` is set, each call fails for lack of memory.
    """

    def __init__(self) -> None:
        self.made: list[list[tuple[int, ...]]] = []
        self.calls: list[int] = []
        self.full = False

    def capture(self, function: Callable[..., Any], inputs: list[tc.Tensor]) -> Callable[..., Any]:
        number = len(self.made)
        self.made.append([tuple(tensor.shape) for tensor in inputs])

        def call(*given: tc.Tensor) -> Any:
            if self.full:
                raise OutOfMemoryError("capture: there is no memory")
            self.calls.append(number)
            return function(*given)

        return call


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    found = Recordings()
    monkeypatch.setattr(tc.cuda, "capture", found.capture)
    return found


def total(inputs: Inputs, first: bool) -> tc.Tensor:
    return inputs["x"].sum() + (100.0 if first else 0.0)


def ones(size: int) -> dict[str, tc.Tensor]:
    return {"x": tc.ones((size,))}


def test_each_shape_has_a_graph_for_first_and_for_later_batches(recordings: Recordings) -> None:
    graphs = PassGraphs(total, 8)
    found = [graphs(ones(n), first).item() for n, first in [(2, True), (2, False), (3, True)] * 2]
    assert found == [102.0, 2.0, 103.0] * 2
    assert recordings.made == [[(2,)], [(2,)], [(3,)]]
    assert recordings.calls == [0, 1, 2] * 2
    # Inputs with other names need another graph.
    graphs({**ones(2), "mask": tc.ones((1,))}, True)
    assert recordings.made[-1] == [(2,), (1,)]


def test_only_the_graphs_used_last_are_kept(recordings: Recordings) -> None:
    graphs = PassGraphs(total, 2)
    for size in (1, 2, 1, 3, 1, 2):
        graphs(ones(size), True)
    assert recordings.made == [[(1,)], [(2,)], [(3,)], [(2,)]]


def test_after_a_stop_passes_run_without_graphs(recordings: Recordings) -> None:
    graphs = PassGraphs(total, 2)
    assert graphs(ones(1), True).item() == 101.0
    recordings.full = True
    with pytest.raises(OutOfMemoryError):
        graphs(ones(1), True)
    assert graphs.stop()
    assert graphs(ones(1), True).item() == 101.0
    assert recordings.calls == [0]
    assert not graphs.stop()


class Batches:
    """Each batch is a number: 1, 2, 3, ..."""

    def batch(self, index: int) -> float:
        return index + 1.0


def test_a_step_without_memory_for_its_graphs_runs_again_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = tc.Var([1.0])
    draws: list[float] = []

    def loss(inputs: Inputs) -> tc.Tensor:
        draws.append(tc.rand(()).item())
        return (weight * inputs["x"]).sum()

    trainer = Trainer(
        loss,
        {"weight": weight},
        tc.optim.SGD([weight], lr=1.0),
        Batches(),
        steps=1,
        inputs=lambda size: {"x": tc.full((1,), size)},
        gradient_accumulation=2,
    )
    # Use graphs, as on a GPU.
    monkeypatch.setattr(trainer, "_graphs", PassGraphs(trainer._pass, 4))
    calls: list[int] = []

    def fail_late(function: Callable[..., Any], _inputs: list[tc.Tensor]) -> Callable[..., Any]:
        def call(*given: tc.Tensor) -> Any:
            result = function(*given)
            calls.append(1)
            if len(calls) == 2:
                raise OutOfMemoryError("capture: there is no memory for a copy of the result")
            return result

        return call

    monkeypatch.setattr(tc.cuda, "capture", fail_late)
    tc.manual_seed(3)
    assert trainer.train()
    # The gradient is the mean of 1 and 2, the gradients of the two batches. The backward passes of
    # the failed attempt at the step add nothing to it.
    assert weight.tolist() == [1.0 - 1.5]
    assert draws[:2] == draws[2:]


def test_a_limit_of_zero_records_no_graph(recordings: Recordings) -> None:
    graphs = PassGraphs(total, 0)
    assert graphs(ones(1), False).item() == 1.0
    assert not recordings.made
