"""Checks that settings, versions, files and trained parameters are the same in all processes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.data.cache import fingerprint
from trainable_candle.distributed.link import differing
from trainable_candle.errors import DistributedError
from trainable_candle.train.callbacks import Callback
from trainable_candle.train.epochs import is_due

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle import Var
    from trainable_candle.distributed.group import Group
    from trainable_candle.train.epochs import Moments
    from trainable_candle.train.trainer import StepReport, Trainer

_SHOWN: Final = 3
"""The most differences that a message names."""
_TOLERANCE: Final = 1e-5
"""Sums count as equal up to this relative difference. GPUs of different models add the same values
in different orders, so their sums differ slightly."""


def require_same(group: Group, what: str, facts: Mapping[str, str]) -> None:
    """Check that all processes have the same facts.

    Args:
        group: the processes.
        what: what the facts describe, for the error message, for example `data`.
        facts: the facts of this process, by name.

    Raises:
        DistributedError: the facts of a process differ from those of rank 0; all processes raise
            it, and the message names the first facts that differ. Or another process has failed.
    """
    # `exchange` returns the messages of all processes, by rank. Compare hashes first; send the
    # facts, perhaps many file names, only if the hashes differ.
    if len(set(group.exchange(fingerprint(facts).encode()))) == 1:
        return
    mine = json.dumps(dict(facts)).encode()
    by_rank = [json.loads(message) for message in group.exchange(mine)]
    rank, differences = next(
        (rank, differences)
        for rank, theirs in enumerate(by_rank)
        if (differences := differing(theirs, by_rank[0]))
    )
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise DistributedError(
        f"distributed: rank {rank} has other {what} than rank 0: {'; '.join(differences[:_SHOWN])}"
        f"{more}; give all processes the same files"
    )


class SameParameters(Callback):
    """Ends the run when the parameters of a process differ from those of rank 0.

    All processes begin with the parameters of rank 0 and apply the same gradients, so they stay
    equal. A difference means that a GPU or a link has made an error, or that a callback has changed
    the parameters of one process alone.

    For each parameter, the sum of its values and the sum of their squares are compared.

    Args:
        group: the processes.
        moments: selects the steps after which the processes compare; the same in all of them.
    """

    def __init__(self, group: Group, moments: Moments) -> None:
        self._group = group
        self._moments = moments

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Compare the parameters if `moments` selects the step.

        Raises:
            DistributedError: a parameter of a process differs from that of rank 0; all processes
                raise it, and the message names the parameter. Or another process has failed.
        """
        if not is_due(self._moments, report.step):
            return
        mine = json.dumps(_sums(trainer.parameters)).encode()
        by_rank = [json.loads(message) for message in self._group.exchange(mine)]
        of_rank_0 = by_rank[0]
        for rank, theirs in enumerate(by_rank):
            for name, var in trainer.parameters.items():
                if not _close(theirs[name], of_rank_0[name], var.numel()):
                    raise DistributedError(
                        f"distributed: after step {report.step}, {name} differs between rank "
                        f"{rank} (its norm is {math.sqrt(theirs[name][1]):.9g}) and rank 0 "
                        f"({math.sqrt(of_rank_0[name][1]):.9g}): a GPU or a link has made an "
                        "error, or a callback has changed the parameters of one process alone; "
                        "continue with --resume latest; if it happens again, set "
                        f"NCCL_P2P_DISABLE=1 or leave out the GPU of rank {rank}"
                    )


def _sums(parameters: Mapping[str, Var]) -> dict[str, tuple[float, float]]:
    """Return, for each parameter, the sum of its values and of their squares, added in f64."""
    sums, squares = [], []
    with tc.no_grad():
        for var in parameters.values():
            values = var.detach().to("f64")
            sums.append(values.sum())
            squares.append(values.square().sum())
        pairs = zip(tc.stack(sums).tolist(), tc.stack(squares).tolist(), strict=True)
    return dict(zip(parameters, pairs, strict=True))


def _close(theirs: tuple[float, float], of_rank_0: tuple[float, float], count: int) -> bool:
    """Return whether two pairs of sums over `count` values, as from `_sums`, are nearly equal."""
    (their_sum, their_squares), (rank_0_sum, rank_0_squares) = theirs, of_rank_0
    # If values have both signs, their sum may be much smaller than its rounding error, which grows
    # with the sum of the absolute values. By the Cauchy-Schwarz inequality, the sum of the absolute
    # values is at most `scale`.
    scale = math.sqrt(count * rank_0_squares)
    same_sum = math.isclose(their_sum, rank_0_sum, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
    return same_sum and math.isclose(their_squares, rank_0_squares, rel_tol=_TOLERANCE)
