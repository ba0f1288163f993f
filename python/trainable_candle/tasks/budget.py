"""Chooses the fastest settings with which a run fits into memory."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.distributed.streamed import BUS, NVLINK, least_sharing, machine, slowest_link
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.placement import AUTO
from trainable_candle.settings.config import group_of
from trainable_candle.settings.machine import DEVICE, HOST, SAME
from trainable_candle.tasks import partial_checkpointing as first_blocks
from trainable_candle.tasks.choices import (
    BLOCKS,
    CHECKPOINTING,
    MODULATION,
    PRECISION,
    STATES,
    TEXTS,
    ladders,
    text_formats,
)
from trainable_candle.tasks.estimate import RUNTIME_BYTES, Item, memory_limit, size
from trainable_candle.tasks.pinned import can_pin, pinned_limit, ring_share, with_ring
from trainable_candle.tasks.refusal import as_flag, refuse, refuse_for_the_host
from trainable_candle.tasks.speed import (
    ANY_GPU,
    computing_seconds,
    copying_seconds,
    rates_of,
    seconds,
    states_seconds,
    with_peers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from trainable_candle.distributed.group import Group
    from trainable_candle.settings import Group as Settings
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Estimate
    from trainable_candle.tasks.speed import Rates

_BATCH: Final = "batch_size"
_ACCUMULATION: Final = "gradient_accumulation"
_OF_BATCH: Final = (CHECKPOINTING, first_blocks.COUNT, PRECISION, TEXTS, MODULATION, BLOCKS, STATES)
"""The settings that a plan chooses for a given batch size."""
PLANNED: Final = (*_OF_BATCH, _BATCH)
"""The settings that a plan chooses if the user leaves them open."""
KEPT_ON_RESUME: Final = (PRECISION, TEXTS, _BATCH)
"""The planned settings that a resumed run keeps, because its results depend on them."""
_PLENTY: Final = {CHECKPOINTING: "none", PRECISION: SAME, TEXTS: SAME, STATES: DEVICE}
"""The values of open settings if memory suffices. The other settings then stay None: nothing is
streamed, and a checkpointing policy is for all blocks."""
_COST: Final = {SAME: 1.0, "int8": 1.1, "fp8": 1.1, "nf4": 1.25}
"""The factor for the time of a step with a base in each format, because rounding changes the model:
a run that also fits with an unrounded base rounds it only if a step gets faster by this factor. A
format that the file already has rounds nothing, so it costs no factor."""
_HOST_STATES: Final = 1.05
"""The factor for the time of a step with the optimizer's states in host memory, because the speed
at which kernels read and write them there has not been measured."""
_BATCHES: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes that `auto` tries after 1."""
_GAIN: Final = 0.97
"""The batch size is doubled if the new time per sample is at most this share of the old time."""
_LINKS: Final = {NVLINK: "NVLink", BUS: "the bus"}
"""Maps links between GPUs to their names in the log."""
_MARGIN: Final = 0.05
"""The share of a GPU's memory that a plan leaves free."""
_LESS: Final = 0.9
"""The share of the first plan's memory that a second plan may take after memory ran out; both are
without `RUNTIME_BYTES`."""
_WORTH: Final = 0.95
"""A faster plan is mentioned if its step takes at most this share of the chosen plan's time."""


@dataclass(frozen=True)
class Budget:
    """The memory that a run may use, and the speed of its GPU."""

    memory: float
    """Bytes that each process may use in its device's memory: that of a GPU, or of the host."""
    host: float
    """Bytes of host memory that each process may use for what `Estimate.host` counts."""
    rates: Rates | None = None
    """The speed of the GPU; None if it is not known."""
    margin: float = 0.0
    """The share of `memory` that a plan leaves free, because estimates may be wrong."""
    processes: int = 1
    """The number of processes on a machine, among which the host memory is divided."""
    sharing: int = 1
    """How many processes of a machine share one copy of the streamed weights."""
    peers: str | None = None
    """The slowest link between GPUs if GPUs hold the streamed weights; None if the host does."""
    pinned: float = math.inf
    """Bytes of host memory that each process may pin."""

    @property
    def planned(self) -> float:
        """Bytes of `memory` that a plan may fill."""
        return self.memory * (1 - self.margin)

    def host_need(self, estimate: Estimate) -> float:
        """Return the bytes of host memory of each process, with its share of streamed weights.

        Weights that are streamed from other GPUs count, too: they take host memory while a model is
        loaded. On the CPU, `estimate.host` is 0: all memory counts as the device's.
        """
        streamed = _streamed(estimate) if estimate.host else 0
        return estimate.host - streamed + streamed / self.sharing

    def can_pin(self, estimate: Estimate) -> bool:
        """Return whether the host can pin the optimizer's states and the offloaded inputs.

        They share the memory that can be pinned with the streamed weights.
        """
        if estimate.work is None:
            return True
        shared = self.sharing > 1
        return can_pin(estimate.work, self._pinnable(estimate), self.pinned, shared=shared)

    def pinned_need(self, estimate: Estimate) -> float:
        """Return the bytes that each process pins, with its share of the streamed weights."""
        work = estimate.work
        if work is None:
            return 0.0
        return self._pinnable(estimate) / self.sharing + work.states + work.offloaded

    def paced(self, estimate: Estimate) -> Rates:
        """Return the GPU's rates, with the rate at which the run copies streamed weights.

        An unknown GPU has those of `ANY_GPU`. A ring is a small pinned buffer for unpinned weights.
        """
        rates = self.rates or ANY_GPU
        if self.peers is not None:
            return with_peers(rates, self.peers)
        share = ring_share(self._pinnable(estimate), self.pinned, shared=self.sharing > 1)
        return with_ring(rates, share)

    def _pinnable(self, estimate: Estimate) -> float:
        """Return the bytes of the streamed weights that are in host memory."""
        return _streamed(estimate) if self.peers is None else 0

    def sliced(
        self, estimate: Callable[[TrainConfig], Estimate]
    ) -> Callable[[TrainConfig], Estimate]:
        """Return a function that adds each GPU's slice of the streamed weights to an estimate.

        If the host holds the streamed weights (no `peers`), there are no slices: the result is
        `estimate` itself.
        """
        if self.peers is None:
            return estimate

        def with_slice(config: TrainConfig) -> Estimate:
            found = estimate(config)
            held = Item("slice of streamed", "weights", math.ceil(_streamed(found) / self.sharing))
            # The slice is in memory in the same phases as the model: those with an adapter.
            phases = {
                phase: [*items, held] if any(item.what == "adapter" for item in items) else items
                for phase, items in found.phases.items()
            }
            return replace(found, phases=phases)

        return with_slice

    def below(self, bytes_held: float) -> Budget:
        """Return a budget below `bytes_held`, the estimate of a plan that ran out of memory."""
        held = min(self.memory, bytes_held) - RUNTIME_BYTES
        return replace(self, memory=_LESS * held + RUNTIME_BYTES, margin=0.0)


def find_budget(group: Group, config: TrainConfig) -> Budget:
    """Return the budget of each process: the least memory and the slowest GPU among all processes.

    All processes get the same budget, so that they make the same plan.

    Args:
        group: the processes of the run, which must all call this function.
        config: the settings, with a device.

    Raises:
        CudaUnavailableError, DeviceError: there is no such device.
    """
    host = (tc.memory.available_bytes() or math.inf) / group.local_size
    name = tc.cuda.get_device_name(config.device) if config.on_gpu else ""
    memory = memory_limit(config)
    if not config.on_gpu and config.vram is None:
        memory /= group.local_size
    mine = {"memory": memory, "host": host, "name": name, "machine": machine()}
    mine["pinned"] = pinned_limit()
    found = [json.loads(facts) for facts in group.exchange(json.dumps(mine).encode())]
    known = [rates for facts in found if (rates := rates_of(facts["name"])) is not None]
    return Budget(
        memory=min(facts["memory"] for facts in found),
        host=min(facts["host"] for facts in found),
        rates=min(known, key=lambda rates: rates.products, default=None),
        margin=_MARGIN if config.on_gpu else 0.0,
        processes=group.local_size,
        sharing=min(group.local_size, least_sharing([facts["machine"] for facts in found])),
        peers=slowest_link(group, config.device) if config.from_peers and config.on_gpu else None,
        pinned=min(facts["pinned"] for facts in found),
    )


@contextmanager
def kept_within(budget: Budget, config: TrainConfig) -> Iterator[None]:
    """Return a context in which tensors on the GPU stay within the budget, if `vram` is set."""
    if config.vram is None or not config.on_gpu:
        yield
        return
    tc.cuda.set_memory_limit(max(0, int(budget.memory) - RUNTIME_BYTES), config.device)
    try:
        yield
    finally:
        tc.cuda.set_memory_limit(None, config.device)


@dataclass(frozen=True)
class Plan:
    """A run's settings after all open settings are chosen, and the estimate of its memory."""

    config: TrainConfig
    estimate: Estimate
    chosen: Mapping[str, Any]
    """The chosen values that differ from those with enough memory (`_PLENTY`), and a chosen batch
    size with its accumulation."""
    nearest: Plan | None = None
    """The plan that needs the least memory among the faster plans, none of which fits; None if no
    plan is notably faster."""

    def lines(self, budget: Budget) -> list[str]:
        """Return lines for the log: choices, a faster plan for more memory, the time of copies."""
        return [*self._choice(budget), *self._copies(budget)]

    def _copies(self, budget: Budget) -> list[str]:
        """Return a line that compares a batch's time of copies with that of its computation.

        There is no line if nothing is copied, or if the GPU's speed is not known.
        """
        work = self.estimate.work
        if work is None or budget.rates is None:
            return []
        rates = budget.paced(self.estimate)
        copying = copying_seconds(work, rates)
        if copying == 0:
            return []
        computing = computing_seconds(work, rates)
        compared = "shorter" if copying <= computing else "longer"
        times = f"{copying:.2g} s, which is {compared} than the {computing:.2g} s of computation"
        return [f"plan: copies to and from the GPU take {times} beside them"]

    def _choice(self, budget: Budget) -> list[str]:
        """Return lines about the chosen settings, and about a faster plan with more memory."""
        if not self.chosen:
            return []
        lines = [f"plan: {self.described(budget)} fits in {size(budget.memory)}"]
        if self.nearest is not None:
            lines.append(f"plan: faster with more memory: {self.nearest.described(budget)}")
        return lines

    def described(self, budget: Budget) -> str:
        """Return the chosen flags, the estimated memory and, if it is known, the time of a step."""
        flags = " ".join(as_flag(name, value) for name, value in self.chosen.items())
        if budget.peers is not None and self.config.streams:
            flags = f"{flags} from {budget.sharing} GPUs by {_LINKS[budget.peers]}".lstrip()
        pace = ""
        if budget.rates is not None and self.estimate.work is not None:
            pace = f", {step_seconds(self, budget):.2g} s a step"
        return f"{flags or 'none of these settings'} (about {size(self.estimate.peak)}{pace})"


def is_open(config: TrainConfig, name: str) -> bool:
    """Return whether the user left a setting to the plan; a batch size of `auto` is stored as 0."""
    value = getattr(config, name)
    return value == 0 if name == _BATCH else value in {None, AUTO}


def make_plan(
    config: TrainConfig,
    groups: Collection[type[Settings]],
    budget: Budget,
    estimate: Callable[[TrainConfig], Estimate],
    samples: int = 1,
) -> Plan:
    """Choose values for the open settings in `PLANNED`: those of the fastest run that fits.

    A batch size of `auto` is 1 on the CPU. On a GPU, it is doubled as long as this reduces the time
    per sample, and as long as a given effective batch divides into such batches. The time with a
    quantized base is multiplied by `_COST` unless the file already has that format, because
    rounding changes the model. The time with optimizer states in host memory is multiplied by
    `_HOST_STATES`. Modulation weights are streamed before blocks, because each step reads them only
    once. Text encoders are quantized only if the run does not fit otherwise, and first to the
    formats of their files.

    Args:
        config: the settings.
        groups: the groups of settings that the model takes; settings of other groups are not
            chosen.
        budget: the available memory, and the speed of the GPU.
        estimate: returns the estimate of a run with the settings that it gets.
        samples: the number of samples per epoch in this process; `auto` chooses no larger batch.

    Raises:
        OutOfMemoryError: no plan fits; the message names settings that would fit, or says that
            another machine is needed.
    """
    estimate = budget.sliced(estimate)
    if not is_open(config, _BATCH):
        return _plan_batch(config, groups, budget, estimate)
    # With an effective batch, the accumulation in `config` is that of batches of one sample: it is
    # the number of samples in a step of this process.
    step_samples = None if config.effective_batch is None else config.gradient_accumulation

    def batch_settings(batch: int) -> dict[str, int]:
        accumulation = {} if step_samples is None else {_ACCUMULATION: step_samples // batch}
        return {_BATCH: batch, **accumulation}

    best = _plan_batch(config.with_(**batch_settings(1)), groups, budget, estimate)
    for batch in _BATCHES:
        divides = step_samples is None or step_samples % batch == 0
        if batch > samples or not config.on_gpu or not divides:
            break
        try:
            larger = _plan_batch(config.with_(**batch_settings(batch)), groups, budget, estimate)
        except OutOfMemoryError:
            break
        if _sample_cost(larger, budget) > _GAIN * _sample_cost(best, budget):
            break
        best = larger
    return replace(best, chosen={**batch_settings(best.config.batch_size), **best.chosen})


def _sample_cost(plan: Plan, budget: Budget) -> float:
    """Return the result of `_cost` per sample."""
    return _cost(plan, budget) / (plan.config.batch_size * plan.config.gradient_accumulation)


def _plan_batch(
    config: TrainConfig,
    groups: Collection[type[Settings]],
    budget: Budget,
    estimate: Callable[[TrainConfig], Estimate],
) -> Plan:
    """Make the plan for a given batch size; see `make_plan`."""
    names = [name for name in _OF_BATCH if is_open(config, name) and group_of(name) in groups]
    # Some settings have no alternative: on the CPU, host memory is the only memory; and a policy
    # that the user gives is for all blocks.
    fixed = {STATES: not config.on_gpu, first_blocks.COUNT: CHECKPOINTING not in names}
    names = [name for name in names if not fixed.get(name)]

    def plan(choice: Mapping[str, Any]) -> Plan:
        values = {name: choice.get(name, _PLENTY.get(name)) for name in names}
        chosen = {name: value for name, value in values.items() if value != _PLENTY.get(name)}
        complete = config.with_(**values)
        return Plan(complete, estimate(complete), chosen)

    first = plan({})
    if _fits(first, budget):
        return first
    work = first.estimate.work
    blocks = work.checkpointed if work is not None and first_blocks.COUNT in names else 0
    fits = partial(_fits, budget=budget)
    plans: list[Plan] = []
    for texts in text_formats(work) if TEXTS in names else (SAME,):
        # In each ladder, a list of choices, every choice streams more weights than the one before.
        found_ladders = ladders(config, names, work)
        with_texts = [[{**choice, TEXTS: texts} for choice in ladder] for ladder in found_ladders]
        plans = _explored(with_texts, plan, budget, blocks)
        fitting = [found for found in plans if fits(found)]
        if fitting:
            best = min(fitting, key=lambda found: _cost(found, budget))
            if blocks and best.config.checkpointing in first_blocks.POLICIES:
                # Recompute no more blocks than necessary.
                choice = {name: getattr(best.config, name) for name in names}
                best = first_blocks.fewest(best, choice, plan, blocks, fits)
            most_cost, time = _WORTH * _cost(best, budget), step_seconds(best, budget)
            # A plan that costs less only because it does not round the base may be slower.
            faster = [
                found
                for found in plans
                if _cost(found, budget) <= most_cost and step_seconds(found, budget) < time
            ]
            nearest = min(faster, key=lambda found: found.estimate.peak, default=None)
            return replace(best, nearest=nearest)
    # No plan fits. `plans` are those with the last text format, which needs the least memory.
    fit_device = [found.estimate for found in plans if found.estimate.peak <= budget.planned]
    if fit_device:
        # These plans lack only host memory. `host` is (needed, free) of all processes together.
        least = min(fit_device, key=budget.host_need)
        host = (budget.host_need(least) * budget.processes, budget.host * budget.processes)
        return refuse_for_the_host(first.estimate, least, groups, host)
    smallest = min(plans, key=lambda found: found.estimate.peak)
    return refuse(first.estimate, smallest.config, groups, budget.planned, estimate)


def _explored(
    lists: Iterable[list[dict[str, Any]]],
    plan: Callable[[Mapping[str, Any]], Plan],
    budget: Budget,
    blocks: int,
) -> list[Plan]:
    """Return plans for those choices that may be the best, or the nearest to fitting.

    The last choice of each list needs the least memory. If its plan fits into the device's memory,
    the earlier choices are planned, too, up to the first that fits. If the policy of the list can
    be limited to the model's first blocks, the first choice that fits and all choices after it are
    also planned with limited policies. A list with states in host memory is left out if a plan of
    an earlier list fits and costs no more than the fastest plan of this list. The result has no
    plans whose states cannot be pinned.

    Args:
        lists: the result of `ladders`, with the precision of the text encoders in each choice.
        plan: makes the plan of a choice.
        budget: the available memory, and the speed of the GPU.
        blocks: how many blocks of the model can have a policy; 0 if policies must be for all.
    """
    fits = partial(_fits, budget=budget)
    plans: list[Plan] = []
    for *earlier, least in lists:
        can_be_limited = blocks > 0 and least[CHECKPOINTING] in first_blocks.POLICIES
        if least[STATES] == HOST and earlier:
            # Streaming makes a step longer, and so does each block that is recomputed.
            limited = {CHECKPOINTING: first_blocks.OTHERS_POLICY} if can_be_limited else {}
            fastest = {**earlier[0], **limited}
            costs = [_cost(found, budget) for found in plans if fits(found)]
            if costs and min(costs) <= _cost(plan(fastest), budget):
                continue
        plans.append(plan(least))
        if plans[-1].estimate.peak > budget.planned:
            continue
        unlimited = list(_until_it_fits(map(plan, earlier), budget))
        plans += unlimited
        if can_be_limited:
            # The index of the first choice that fits; if no earlier choice fits, that of the last.
            start = sum(not fits(found) for found in unlimited)
            costs = [_cost(found, budget) for found in plans if fits(found)]
            best_cost = min(costs, default=math.inf)

            def is_worth_it(found: Plan, limit: float = first_blocks.WORTH * best_cost) -> bool:
                return _cost(first_blocks.without_recomputation(found), budget) <= limit

            ladder = [*earlier, least][start:]
            plans += first_blocks.plans_along_border(ladder, plan, blocks, fits, is_worth_it)
    return [found for found in plans if _can_pin(found, budget)]


def _until_it_fits(plans: Iterable[Plan], budget: Budget) -> Iterator[Plan]:
    """Yield plans, which come by falling memory and rising time, up to the first that fits."""
    for plan in plans:
        yield plan
        if _fits(plan, budget):
            return


def _streamed(estimate: Estimate) -> float:
    """Return the bytes of all streamed weights."""
    return estimate.work.streamed + estimate.work.modulation if estimate.work else 0


def _fits(plan: Plan, budget: Budget) -> bool:
    """Return whether a plan fits into the device's memory, host memory and pinned memory."""
    estimate = plan.estimate
    fits_host = budget.host_need(estimate) <= budget.host and _can_pin(plan, budget)
    return estimate.peak <= budget.planned and fits_host


def _can_pin(plan: Plan, budget: Budget) -> bool:
    """Return whether the host can pin the states, if the plan chose host memory for them.

    If the user gave host memory, nothing is checked, and the result is True.
    """
    return STATES not in plan.chosen or budget.can_pin(plan.estimate)


def _cost(plan: Plan, budget: Budget) -> float:
    """Return the time of a step, multiplied by the factors of `_COST` and `_HOST_STATES`."""
    work, form = plan.estimate.work, plan.config.base_format
    is_stored = work is not None and work.stored_format == form
    penalty = 1.0 if is_stored else _COST[form or SAME]
    if plan.config.states_on_host and STATES in plan.chosen:
        penalty *= _HOST_STATES
    return step_seconds(plan, budget) * penalty


def step_seconds(plan: Plan, budget: Budget) -> float:
    """Return the approximate time of a step; 0 without `work` (what it computes and copies)."""
    work = plan.estimate.work
    if work is None:
        return 0.0
    rates = budget.paced(plan.estimate)
    batches = seconds(work, rates) * plan.config.gradient_accumulation
    return batches + states_seconds(work, rates)
