"""Plans that recompute only the first blocks of a model; the others checkpoint selectively."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainable_candle.tasks.budget import Plan

PART: Final = "checkpoint_blocks"
OF_PARTS: Final = ("full", "offload")
"""The policies that the first blocks alone can have."""
GAIN: Final = 0.99
"""Plans that recompute only the first blocks are tried if the time of a step may fall to this share
of the best time so far."""
OTHERS: Final = "selective"
"""The policy of the blocks that are not among the first."""
_SHARES: Final = 8
"""Plans are tried for eighths of all blocks; then the chosen number is made as small as fits."""


def without_parts(found: Plan) -> Plan:
    """Return a plan with a lower bound of its time: that of a step that recomputes no block."""
    work = found.estimate.work
    if work is None:
        return found
    work = replace(work, recomputed=0.0, offloaded=0.0)
    return replace(found, estimate=replace(found.estimate, work=work))


def with_parts(
    ladder: Sequence[Mapping[str, Any]],
    plan: Callable[[Mapping[str, Any]], Plan],
    blocks: int,
    fits: Callable[[Plan], bool],
    is_worth_it: Callable[[Plan], bool],
) -> Iterator[Plan]:
    """Yield plans along the border of what fits: less recomputation needs more streaming.

    Args:
        ladder: choices in the order of falling memory, with a policy that recomputes blocks. The
            first fits if it recomputes all blocks.
        plan: makes the plan of a choice.
        blocks: the number of all blocks.
        fits: whether a plan fits.
        is_worth_it: whether a plan with this streaming may be faster than those known.
    """
    counts = iter(_counts(blocks))
    count = next(counts, None)
    for choice in ladder:
        while count is not None:
            found = plan({**choice, PART: count})
            yield found
            if not is_worth_it(found):
                # More streaming takes even longer.
                return
            if not fits(found):
                break
            count = next(counts, None)


def fewest(
    best: Plan,
    choice: Mapping[str, Any],
    plan: Callable[[Mapping[str, Any]], Plan],
    blocks: int,
    fits: Callable[[Plan], bool],
) -> Plan:
    """Return the plan that differs from `best` only by recomputing as few blocks as fit.

    Args:
        best: a plan that fits.
        choice: the choice of `best`.
        plan: makes the plan of a choice.
        blocks: the number of all blocks.
        fits: whether a plan fits.
    """
    most = choice[PART] or blocks
    least = max((count for count in _counts(blocks) if count < most), default=0) + 1
    while least < most:
        middle = (least + most) // 2
        found = plan({**choice, PART: middle})
        if fits(found):
            best, most = found, middle
        else:
            least = middle + 1
    return best


def _counts(blocks: int) -> list[int]:
    """Return one eighth to seven eighths of the number of blocks, the largest first."""
    counts = {blocks * share // _SHARES for share in range(1, _SHARES)}
    return sorted(counts - {0}, reverse=True)
