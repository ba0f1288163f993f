"""Forward and backward passes as CUDA graphs: which are recorded and kept, and when none are used.

A stand-in replaces `tc.cuda.capture`, so the tests need no GPU.
"""

import itertools
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

    `captured_shapes` has the input shapes of each captured graph. `calls` has an entry for each
    call of a graph: the index of that graph in `captured_shapes`. If `out_of_memory` is set, each
    call fails.
    """

    def __init__(self) -> None:
        self.captured_shapes: list[list[tuple[int, ...]]] = []
        self.calls: list[int] = []
        self.out_of_memory = False

    def capture(self, function: Callable[..., Any], inputs: list[tc.Tensor]) -> Callable[..., Any]:
        number = len(self.captured_shapes)
        self.captured_shapes.append([tuple(tensor.shape) for tensor in inputs])

        def call(*given: tc.Tensor) -> Any:
            if self.out_of_memory:
                raise OutOfMemoryError("capture: there is no memory")
            self.calls.append(number)
            return function(*given)

        return call


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    stand_in = Recordings()
    monkeypatch.setattr(tc.cuda, "capture", stand_in.capture)
    return stand_in


def total(inputs: Inputs, first: bool) -> tc.Tensor:
    """Return the sum of x, plus 100 for the first batch of a step."""
    return inputs["x"].sum() + (100.0 if first else 0.0)


def ones(size: int) -> dict[str, tc.Tensor]:
    return {"x": tc.ones((size,))}


def test_each_shape_has_one_graph_for_first_and_one_for_later_batches(
    recordings: Recordings,
) -> None:
    graphs = PassGraphs(total, keep=8)
    found = [graphs(ones(n), first).item() for n, first in [(2, True), (2, False), (3, True)] * 2]
    assert found == [102.0, 2.0, 103.0] * 2
    assert recordings.captured_shapes == [[(2,)], [(2,)], [(3,)]]
    assert recordings.calls == [0, 1, 2] * 2
    # More inputs need another graph.
    graphs({**ones(2), "mask": tc.ones((1,))}, True)
    assert recordings.captured_shapes[-1] == [(2,), (1,)]


def test_only_the_most_recently_used_graphs_are_kept(recordings: Recordings) -> None:
    graphs = PassGraphs(total, keep=2)
    for size in (1, 2, 1, 3, 1, 2):
        graphs(ones(size), True)
    # The graph for size 3 replaces that for size 2, which is then captured again.
    assert recordings.captured_shapes == [[(1,)], [(2,)], [(3,)], [(2,)]]


def test_after_stop_passes_run_without_graphs(recordings: Recordings) -> None:
    graphs = PassGraphs(total, keep=2)
    assert graphs(ones(1), True).item() == 101.0
    recordings.out_of_memory = True
    with pytest.raises(OutOfMemoryError):
        graphs(ones(1), True)
    # `stop` returns whether recording was on before the call.
    assert graphs.stop()
    assert graphs(ones(1), True).item() == 101.0
    assert recordings.calls == [0]
    assert not graphs.stop()


class Batches:
    """Batches that are numbers: 1, 2, 3, ..."""

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
        inputs=lambda number: {"x": tc.full((1,), number)},
        gradient_accumulation=2,
    )
    # Make the trainer use graphs, as on a GPU.
    monkeypatch.setattr(trainer, "_graphs", PassGraphs(trainer._pass, keep=4))
    call_numbers = itertools.count(1)

    def capture(function: Callable[..., Any], _inputs: list[tc.Tensor]) -> Callable[..., Any]:
        def call(*given: tc.Tensor) -> Any:
            result = function(*given)
            # Fail after the passes of the second batch.
            if next(call_numbers) == 2:
                raise OutOfMemoryError("capture: there is no memory for a copy of the result")
            return result

        return call

    monkeypatch.setattr(tc.cuda, "capture", capture)
    tc.manual_seed(3)
    assert trainer.train()
    # The gradient of the step is the mean of 1 and 2, the gradients of its two batches. The first
    # attempt at the step failed; its backward passes add nothing to the gradient.
    assert weight.tolist() == [1.0 - 1.5]
    # The second attempt repeats the random numbers of the first.
    assert draws[:2] == draws[2:]


def test_a_limit_of_zero_records_no_graph(recordings: Recordings) -> None:
    graphs = PassGraphs(total, keep=0)
    assert graphs(ones(1), False).item() == 1.0
    assert not recordings.captured_shapes
