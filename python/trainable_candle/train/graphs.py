"""Forward and backward passes as CUDA graphs, recorded once for each batch shape, then replayed."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import trainable_candle as tc
from trainable_candle import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from trainable_candle import Tensor

    Inputs = Mapping[str, Tensor]


class PassGraphs:
    """Runs a function as CUDA graphs (`tc.cuda.capture`).

    There is one graph for each combination of the inputs' names, shapes and dtypes and of `first`.
    If streamed weights are in pageable memory, from which graphs cannot copy, the function runs
    without graphs.

    Args:
        run: the function, such as a forward and backward pass. Its arguments are the inputs by
            name, and `first`: whether the call is the first of an optimizer step. It returns a
            tensor.
        keep: how many of the most recently used graphs to keep; 0 records nothing.
    """

    def __init__(self, run: Callable[[Inputs, bool], Tensor], keep: int) -> None:
        self._run = run
        self._keep = keep
        self._captured: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __call__(self, inputs: Inputs, first: bool) -> Tensor:
        """Return the function's result; its arguments are `inputs` and `first`."""
        if not self._keep or self._copies_from_pageable(inputs):
            return self._run(inputs, first)
        shapes = tuple((name, tensor.shape, str(tensor.dtype)) for name, tensor in inputs.items())
        key = (shapes, first)
        # The most recently used graph is the last one.
        captured = self._captured.pop(key, None) or self._capture(inputs, first)
        result: Tensor = captured(*inputs.values())
        self._captured[key] = captured
        while len(self._captured) > self._keep:
            self._captured.popitem(last=False)
        return result

    @staticmethod
    def _copies_from_pageable(inputs: Inputs) -> bool:
        """Return whether weights streamed to the inputs' device are in pageable host memory."""
        device = str(next(iter(inputs.values())).device)
        return device != "cpu" and _core.cuda_stages_weights(device)

    def stop(self) -> bool:
        """Drop all graphs, record no more, and return whether recording was on."""
        was_recording = self._keep > 0
        self._keep = 0
        self._captured.clear()
        return was_recording

    def _capture(self, inputs: Inputs, first: bool) -> Callable[..., Any]:
        """Record the function with these inputs; the result takes tensors in the same order."""
        names = list(inputs)

        def run_on(*tensors: Tensor) -> Tensor:
            return self._run(dict(zip(names, tensors, strict=True)), first)

        return tc.cuda.capture(run_on, list(inputs.values()))
