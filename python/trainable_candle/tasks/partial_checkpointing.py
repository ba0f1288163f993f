"""Plans that recompute only the first blocks of a model; the others have the policy "selective".

In this module, "recompute" means one of `POLICIES`, which recompute whole blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainable_candle.tasks.budget import Plan

COUNT: Final = "checkpoint_blocks"
"""The setting with the number of blocks, from the first on, that are recomputed; None: all."""
POLICIES: Final = ("full", "offload")
"""The policies that recompute whole blocks; they can be limited to the first blocks."""
WORTH: Final = 0.99
"""Plans that recompute only the first blocks are tried as long as they may shorten a step to this
share of the shortest known time, or to less."""
OTHERS_POLICY: Final = "selective"
"""The policy of the blocks that are not among the first."""
_SHARES: Final = 8
"""`plans_along_border` tries eighths of all blocks; `fewest` then makes the chosen number as small
as fits."""


def without_recomputation(plan: Plan) -> Plan:
    """Return the plan as if it recomputed no block.

    Its time is a lower bound for all plans that differ only in the number of recomputed blocks.
    """
    work = plan.estimate.work
    if work is None:
        return plan
    work = replace(work, recomputed=0.0, offloaded=0.0)
    return replace(plan, estimate=replace(plan.estimate, work=work))


def plans_along_border(
    ladder: Sequence[Mapping[str, Any]],
    plan: Callable[[Mapping[str, Any]], Plan],
    blocks: int,
    fits: Callable[[Plan], bool],
    is_worth_it: Callable[[Plan], bool],
) -> Iterator[Plan]:
    """Yield plans along the border of what fits: less recomputation needs more streaming.

    A choice maps names of settings to values. For each choice, the number of recomputed blocks
    falls until the plan no longer fits. The next choice, which streams more, continues with this
    number. So plans that do not fit are among those yielded.

    Args:
        ladder: choices with one policy of `POLICIES`, in the order of more streaming and less
            memory. The first choice fits if all blocks are recomputed; that plan is known already,
            and is not yielded.
        plan: makes the plan of a choice.
        blocks: the number of all blocks.
        fits: whether a plan fits.
        is_worth_it: whether any plan that streams as much as the given one, and recomputes fewer
            blocks, may be fast enough.
    """
    counts = iter(_counts(blocks))
    count = next(counts, None)
    for choice in ladder:
        while count is not None:
            found = plan({**choice, COUNT: count})
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
    """Return `best`, but with the smallest number of recomputed blocks that fits.

    Args:
        best: the fastest plan that fits.
        choice: the values of the settings of `best`, by name.
        plan: makes the plan of a choice.
        blocks: the number of all blocks.
        fits: whether a plan fits.
    """
    most = choice[COUNT] or blocks
    # The next smaller number that `plans_along_border` tries does not fit: if it did, its plan
    # would be the fastest. So the result is larger than that number. If `plans_along_border` ended
    # before that number, smaller numbers could shorten the step by less than 1 percent (`WORTH`).
    least = max((count for count in _counts(blocks) if count < most), default=0) + 1
    # Bisect: a plan that recomputes `most` blocks fits.
    while least < most:
        middle = (least + most) // 2
        found = plan({**choice, COUNT: middle})
        if fits(found):
            best, most = found, middle
        else:
            least = middle + 1
    return best


def _counts(blocks: int) -> list[int]:
    """Return one eighth to seven eighths of the number of blocks, the largest first."""
    counts = {blocks * share // _SHARES for share in range(1, _SHARES)}
    return sorted(counts - {0}, reverse=True)
