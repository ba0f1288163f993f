"""Makes the inputs of the loss for each batch of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

import trainable_candle as tc
from trainable_candle.draws import drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.group import Group
    from trainable_candle.train.source import BatchSource

Batch = TypeVar("Batch")

SHARE: Final = "share"
"""The name of the input that has a batch's share; see `BatchInputs.share`."""


class BatchInputs(NamedTuple):
    """The inputs of the loss of one of a step's batches, and what is known about the batch."""

    number: int
    """The number of the batch in the run, counted over all processes."""
    inputs: Any
    share: float
    """The factor of this batch's loss in the loss of the step: the batch's weight (1 if the
    trainer has no `weigh`) times a number that is the same for all batches of the step."""
    amount: float = 0.0
    """The number of images, tokens or other units in the batch."""


@dataclass(frozen=True)
class StepInputs(Generic[Batch]):
    """Makes the inputs of steps. The fields are arguments of `Trainer`, which explains them."""

    data: BatchSource[Batch]
    parameters: Mapping[str, Var]
    group: Group
    gradient_accumulation: int
    seed: int
    inputs: Callable[[Batch], Mapping[str, Tensor]] | None
    weigh: Callable[[Batch], float] | None
    """Returns the weight of a batch in the loss of its step; None: batches count equally."""
    count: Callable[[Batch], float] | None
    """Returns the number of a batch's images or tokens, which is only reported."""

    @property
    def batches_in_step(self) -> int:
        """The number of batches that all processes together use in a step."""
        return self.gradient_accumulation * self.group.size

    def of_step(self, first: int) -> list[BatchInputs]:
        """Make the inputs of a step for the batches of this process.

        Args:
            first: the number of the step's first batch.
        """
        numbers = range(first + self.group.rank, first + self.batches_in_step, self.group.size)
        # The random numbers of a batch depend only on the seed and the number of the batch.
        batches = [
            drawn(self.seed, "inputs", number, partial(self._of_batch, number))
            for number in numbers
        ]
        if self.weigh is None:
            equal_share = 1.0 / self.batches_in_step
            return [
                BatchInputs(number, inputs, equal_share, amount)
                for number, (inputs, _, amount) in zip(numbers, batches, strict=True)
            ]
        # With several processes, no process knows the others' weights before the step. So these
        # shares need not add up to 1: after the step, `distributed.sums.sum_up` divides the loss
        # and the gradients by the sum of the shares of all processes.
        is_alone = self.group.size == 1
        total = math.fsum(weight for _, weight, _ in batches)
        divisor = total if is_alone else self.batches_in_step
        device = next(iter(self.parameters.values())).device
        with_shares = []
        for number, (inputs, weight, amount) in zip(numbers, batches, strict=True):
            share = np.array(weight / divisor, np.float32)
            # The share is a tensor, because a replayed CUDA graph reads its inputs again, but
            # repeats the value that a Python number had during the recording.
            named = {**inputs, SHARE: tc.tensor(share, device=device)}
            with_shares.append(BatchInputs(number, named, weight / divisor, amount))
        return with_shares

    def _of_batch(self, number: int) -> tuple[Any, float, float]:
        """Return the inputs of the loss of a batch, the weight of the batch, and its count."""
        batch = self.data.batch(number)
        weight = 1.0 if self.weigh is None else self.weigh(batch)
        amount = 0.0 if self.count is None else self.count(batch)
        return batch if self.inputs is None else self.inputs(batch), weight, amount
