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
    """One loss per batch, f64, without dimensions."""
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
        weighed: whether the sum of the `shares` of all processes may differ from 1; the gradients
            and the loss are then divided by this sum.

    Returns:
        The mean loss, how many processes were asked to stop, and the sum of the amounts, all f64.

    Raises:
        DistributedError: another process has failed.
    """
    terms = [share * one for share, one in zip(mine.shares, mine.losses, strict=True)]
    known = [math.fsum(mine.shares), float(mine.asked), mine.amount]
    extra = tc.tensor(known, dtype="f64", device=mine.losses[0].device)
    tail = tc.cat([tc.stack(terms).sum().reshape((1,)), extra])
    mean, whole, asked, amount = group.sum_gradients(parameters, tail).chunk(4)
    if weighed:
        mean = mean / whole
        vectors = gradient_vectors(parameters)
        by = whole.to(vectors[0].dtype)
        set_gradient_vectors(parameters, [vector / by for vector in vectors])
    return [each.reshape(()) for each in (mean, asked, amount)]
