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
"""The greatest relative difference between sums that are still taken as equal. GPUs of different
models add the same values in different orders, so their sums differ slightly."""


def require_same(group: Group, what: str, facts: Mapping[str, str]) -> None:
    """Check that all processes have the same facts.

    Args:
        group: the processes.
        what: the kind of facts for the message, for example `data`.
        facts: the facts of this process, by name.

    Raises:
        DistributedError: in all processes, if a process has other facts than rank 0; the message
            names the facts that differ.
    """
    # Compare hashes first; send the facts, perhaps many file names, only if the hashes differ.
    if len(set(group.exchange(fingerprint(facts).encode()))) == 1:
        return
    every = [json.loads(message) for message in group.exchange(json.dumps(dict(facts)).encode())]
    rank, differs = next(
        (rank, found) for rank, theirs in enumerate(every) if (found := differing(theirs, every[0]))
    )
    more = f"; and {len(differs) - _SHOWN} more" if len(differs) > _SHOWN else ""
    raise DistributedError(
        f"distributed: rank {rank} has other {what} than rank 0: {'; '.join(differs[:_SHOWN])}"
        f"{more}; give all processes the same files"
    )


class SameParameters(Callback):
    """Ends the run when a process has other parameters than rank 0.

    All processes begin with the parameters of rank 0 and apply the same gradients, so they stay
    equal. A difference means that a GPU or a link has made an error, or that a callback has changed
    the parameters of one process alone.

    Two numbers of each tensor are compared: the sum of its values and the sum of their squares.

    Args:
        group: the processes.
        moments: the number of steps between two comparisons, or a function that tells whether to
            compare after a step.
    """

    def __init__(self, group: Group, moments: Moments) -> None:
        self._group = group
        self._moments = moments

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        """Compare if the step is due.

        Raises:
            DistributedError: in all processes, if a process has another parameter than rank 0; the
                message names the parameter.
        """
        if not is_due(self._moments, report.step):
            return
        mine = json.dumps(_sums(trainer.parameters)).encode()
        every = [json.loads(message) for message in self._group.exchange(mine)]
        for rank, theirs in enumerate(every):
            for name, var in trainer.parameters.items():
                if not _close(theirs[name], every[0][name], var.numel()):
                    raise DistributedError(
                        f"distributed: after step {report.step}, {name} differs between rank "
                        f"{rank} (its norm is {math.sqrt(theirs[name][1]):.9g}) and rank 0 "
                        f"({math.sqrt(every[0][name][1]):.9g}): a GPU or a link has made an error; "
                        "continue with --resume latest, with NCCL_P2P_DISABLE=1 or without this "
                        "GPU if it happens again"
                    )


def _sums(parameters: Mapping[str, Var]) -> dict[str, tuple[float, float]]:
    """Return the sum of each tensor's values, and of their squares, added in f64."""
    sums, squares = [], []
    with tc.no_grad():
        for var in parameters.values():
            values = var.detach().to("f64")
            sums.append(values.sum())
            squares.append(values.square().sum())
        found = zip(tc.stack(sums).tolist(), tc.stack(squares).tolist(), strict=True)
    return dict(zip(parameters, found, strict=True))


def _close(theirs: tuple[float, float], ours: tuple[float, float], count: int) -> bool:
    # If values have both signs, their sum may be much smaller than its rounding error, which grows
    # with the sum of the absolute values. That sum is at most sqrt(count * sum of squares).
    scale = math.sqrt(count * ours[1])
    same_sum = math.isclose(theirs[0], ours[0], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * scale)
    return same_sum and math.isclose(theirs[1], ours[1], rel_tol=_TOLERANCE)
