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


class OwnTerms(NamedTuple):
    """The terms of this process in the sums of a step, besides its gradients."""

    losses: Sequence[Tensor]
    """The loss of each batch, an f64 tensor without dimensions."""
    shares: Sequence[float]
    """The weight of each loss in the loss of the step: that is the sum of share times loss, which
    `divide_by_shares` divides by the sum of the shares."""
    stop_requested: bool
    """Whether this process was asked to stop."""
    amount: float
    """The number of images, tokens or other units that this process trains on in the step."""


def sum_up(
    group: Group, parameters: Mapping[str, Var], own: OwnTerms, *, divide_by_shares: bool
) -> list[Tensor]:
    """Add up the gradients of all processes, in place, and their losses and counts.

    Args:
        group: the processes.
        parameters: the variables with the gradients.
        own: the losses and counts of this process.
        divide_by_shares: whether to divide the gradients and the loss by the sum of the `shares`
            of all processes. Batches with weights need this, because no process knows the sum
            before this call. Without it, the shares of all processes must add up to 1.

    Returns:
        The loss of the step, how many processes were asked to stop, and the sum of the amounts: f64
        tensors without dimensions.

    Raises:
        DistributedError: another process has failed.
    """
    terms = [share * loss for share, loss in zip(own.shares, own.losses, strict=True)]
    counts = [math.fsum(own.shares), float(own.stop_requested), own.amount]
    # `sum_gradients` adds up `tail`, four numbers of each process, together with the gradients.
    extra = tc.tensor(counts, dtype="f64", device=own.losses[0].device)
    tail = tc.cat([tc.stack(terms).sum().reshape((1,)), extra])
    loss, shares, stop_requests, amount = group.sum_gradients(parameters, tail).chunk(4)
    if divide_by_shares:
        loss = loss / shares
        # Gradients that are adjacent in memory are one vector, so a few divisions suffice.
        vectors = gradient_vectors(parameters)
        divisor = shares.to(vectors[0].dtype)
        set_gradient_vectors(parameters, [vector / divisor for vector in vectors])
    return [total.reshape(()) for total in (loss, stop_requests, amount)]
