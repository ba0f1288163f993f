"""Sums over the processes in a step: gradients, losses and counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import trainable_candle as tc
from trainable_candle._core import gradient_vectors, set_gradient_vectors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.group import Group


class Mine(NamedTuple):
    """The terms of this process in the sums of a step, besides its gradients."""

    losses: Sequence[Tensor]
    """The loss of each batch, an f64 tensor without dimensions."""
    shares: Sequence[float]
    """The weight of each loss in the loss of the step."""
    asked: bool
    """Whether this process was asked to stop."""
    amount: float
    """The number of images, tokens or other units that this process trains on in the step."""


def sum_up(
    group: Group, parameters: Mapping[str, Var], mine: Mine, *, weighed: bool
) -> list[Tensor]:
    """Add up the gradients of all processes, in place, and their losses and counts.

    Args:
        group: the processes.
        parameters: the variables with the gradients.
        mine: the losses and counts of this process.
        weighed: whether the sum of the `shares` of all processes may differ from 1; if so, the
            gradients and the loss are divided by this sum.

    Returns:
        The mean loss, how many processes were asked to stop, and the sum of the amounts: f64
        tensors without dimensions.

    Raises:
        DistributedError: another process has failed.
    """
    terms = [share * loss for share, loss in zip(mine.shares, mine.losses, strict=True)]
    counts = [math.fsum(mine.shares), float(mine.asked), mine.amount]
    extra = tc.tensor(counts, dtype="f64", device=mine.losses[0].device)
    tail = tc.cat([tc.stack(terms).sum().reshape((1,)), extra])
    loss, shares, asked, amount = group.sum_gradients(parameters, tail).chunk(4)
    if weighed:
        loss = loss / shares
        vectors = gradient_vectors(parameters)
        divisor = shares.to(vectors[0].dtype)
        set_gradient_vectors(parameters, [vector / divisor for vector in vectors])
    return [total.reshape(()) for total in (loss, asked, amount)]
