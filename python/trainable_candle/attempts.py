"""Train with the settings of a plan; if memory runs out, plan for less and start once more."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trainable_candle as tc
from trainable_candle.data.folder import counted
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.tasks.budget import kept_within
from trainable_candle.tasks.estimate import size
from trainable_candle.train.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.budget import Budget, Plan
    from trainable_candle.train.trainer import StepReport, Trainer

    Report = Callable[[str], None]

_FIRST_STEPS: Final = 20
"""If memory runs out before this many steps are done, a second attempt gets a smaller plan."""
_TOLERANCE: Final = 0.05
"""A run that took at most this fraction more memory than predicted is not reported."""

T = TypeVar("T")


class StepCounter(Callback):
    """Counts the steps that a run has done."""

    steps = 0

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        """Count the step."""
        self.steps += 1


def report_plan(plan: Plan, budget: Budget, report: Report) -> None:
    """Report the estimated memory of a run, and the settings that were chosen to fit."""
    for line in [*plan.estimate.table(), *plan.lines(budget)]:
        report(line)


def run_planned(
    run: Callable[[TrainConfig], T],
    plan: Plan,
    budget: Budget,
    replan: Callable[[Budget], Plan],
    counter: StepCounter,
    may_repeat: Callable[[], bool],
    report: Report,
) -> T:
    """Run within the budget; if memory runs out in the first steps, plan again and start anew.

    Args:
        run: trains with the settings of a plan.
        plan: the plan of the first attempt.
        budget: the memory that this plan fits in.
        replan: makes a plan for a smaller budget.
        counter: counts the steps that `run` does.
        may_repeat: returns False if a second attempt would lose what the first has saved, or cannot
            be made for another reason.
        report: gets lines about memory that ran out, the second plan and wrong predictions.

    Raises:
        OutOfMemoryError: memory ran out in the second attempt; or memory ran out in the first one,
            and this was after the first steps, `may_repeat` returned False, or there is no smaller
            plan.
    """
    # Both attempts may take this budget; only the plan of the second one is for a smaller budget.
    with kept_within(budget, plan.config):
        try:
            return _measured(run, plan, report)
        except OutOfMemoryError as error:
            if counter.steps >= _FIRST_STEPS or not may_repeat():
                raise
            report(f"plan: memory ran out after {counted(counter.steps, 'step')}: {error}")
            # The next plan must need less than this plan's estimate, which was too low.
            budget, tried = budget.below(plan.estimate.peak), plan
            # Without a smaller plan, `plan` stays, and the first attempt's error is raised.
            with suppress(OutOfMemoryError):
                plan = replan(budget)
            if plan.config == tried.config:
                raise
        report_plan(plan, budget, report)
        # After the `except` block, nothing refers to the models of the first attempt any more.
        gc.collect()
        if plan.config.on_gpu:
            tc.cuda.empty_cache(plan.config.device)
        return _measured(run, plan, report)


def _measured(run: Callable[[TrainConfig], T], plan: Plan, report: Report) -> T:
    """Run with a plan's settings; report memory that exceeded the prediction or ran out."""
    if plan.config.on_gpu:
        tc.cuda.reset_peak_memory_stats(plan.config.device)
    try:
        result = run(plan.config)
    except OutOfMemoryError:
        _compare(plan, "had taken", " when memory ran out", report)
        raise
    if _excess(plan) > _TOLERANCE:
        _compare(plan, "took", "", report)
    return result


def _excess(plan: Plan) -> float:
    """Return (memory that the run took - predicted memory) / predicted memory.

    The result is 0 on the CPU, where the peak also counts what was in memory before the run.
    """
    return _peak(plan) / plan.estimate.peak - 1 if plan.config.on_gpu else 0.0


def _peak(plan: Plan) -> int:
    return tc.cuda.memory_stats(plan.config.device)["peak_reserved"]


def _compare(plan: Plan, verb: str, when: str, report: Report) -> None:
    """Report the memory that a run on a GPU took, and by how much the prediction was wrong."""
    if plan.config.on_gpu:
        excess = _excess(plan)
        report(
            f"plan: the run {verb} {size(_peak(plan))} of GPU memory{when}, where "
            f"{size(plan.estimate.peak)} were predicted "
            f"({100 * abs(excess):.0f} % {'more' if excess > 0 else 'less'})"
        )
