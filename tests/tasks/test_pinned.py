"""Test the predicted times of steps if too little memory can be pinned for the streamed weights.

The GPU reads pinned weights directly. A thread of the host first copies other weights into a small
ring of pinned buffers. Each step copies the streamed weights of blocks twice, in the forward and in
the backward pass, and modulation weights once.
"""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from trainable_candle import _core
from trainable_candle.tasks import pinned
from trainable_candle.tasks.budget import Budget, Plan, step_seconds
from trainable_candle.tasks.estimate import Estimate, Item
from trainable_candle.tasks.pinned import (
    HOST_COPY,
    PROBED,
    TRIED,
    can_pin,
    pinned_limit,
    probed,
    ring_share,
    with_ring,
)
from trainable_candle.tasks.speed import GPUS, Work, seconds
from trainable_candle.train import TrainConfig

GIB = 2**30
# The copies take much longer than the computation, so they determine the time.
WORK = Work(
    layers=1e9,
    attention=1e8,
    kept=1e6,
    recomputed=0,
    decoded=0,
    streamed=30 * GIB,
    modulation=2 * GIB,
    offloaded=0,
    states=0,
    blocks=8,
    has_modulation=True,
    can_be_quantized=False,
)
STREAMED = WORK.streamed + WORK.modulation
BUDGET = Budget(memory=24 * GIB, host=64 * GIB, rates=GPUS["RTX 4090"])


def plan_of(work: Work, device: str = "cuda") -> Plan:
    """Return a plan whose run does `work`; what it needs in GPU memory does not matter."""
    nothing = Item("", "", 0)
    found = Estimate({"training": [nothing]}, on_gpu=True, work=work, host=int(STREAMED))
    return Plan(TrainConfig(device=device, precision="bf16"), found, chosen={})


def predicted(gpu: str, limit: float, **changes: int | str) -> float:
    """Return the predicted seconds of a step if each process can pin `limit` bytes."""
    budget = replace(BUDGET, rates=GPUS[gpu], pinned=limit, **changes)
    return step_seconds(plan_of(WORK), budget)


def test_with_enough_pinned_memory_nothing_changes() -> None:
    for limit in (STREAMED, math.inf):
        assert predicted("RTX 4090", limit) == seconds(WORK, GPUS["RTX 4090"])


@pytest.mark.parametrize("gpu", ["RTX 4060 Ti", "RTX 4090", "RTX 5090"])
def test_without_pinned_memory_the_slower_of_both_copies_sets_the_time(gpu: str) -> None:
    # The link to the GPU and the thread of the host copy at these rates, in bytes per second.
    rate = min(GPUS[gpu].link, HOST_COPY)
    expected = (2 * WORK.streamed + WORK.modulation) / rate
    assert predicted(gpu, 0) == pytest.approx(expected, rel=1e-3)
    # If the link is slower than the host's copies, the link sets the rate. `streams` is the rate of
    # the streamed weights.
    slow_link = replace(GPUS[gpu], link=0.5 * HOST_COPY)
    assert with_ring(slow_link, share=1.0).streams == pytest.approx(slow_link.link)


def test_if_too_little_can_be_pinned_streamed_weights_get_seven_tenths_of_it() -> None:
    # The other streamed weights go through the ring.
    share_of_ring = 1 - 0.7 * 16 * GIB / STREAMED
    assert ring_share(STREAMED, 16 * GIB, shared=False) == pytest.approx(share_of_ring)
    link = GPUS["RTX 4090"].link
    copied_bytes = 2 * WORK.streamed + WORK.modulation
    expected = copied_bytes * (share_of_ring / HOST_COPY + (1 - share_of_ring) / link)
    assert predicted("RTX 4090", 16 * GIB) == pytest.approx(expected, rel=1e-3)


def test_shared_weights_are_pinned_as_a_whole_or_not_at_all() -> None:
    assert predicted("RTX 4090", 16 * GIB, sharing=2) == predicted("RTX 4090", 0)
    assert predicted("RTX 4090", STREAMED, sharing=2) == predicted("RTX 4090", math.inf)
    # Weights that are streamed from slices on the GPUs need no pinned memory.
    without, ample = (predicted("RTX 4090", limit, peers="nvlink") for limit in (0, math.inf))
    assert without == ample


def test_states_can_take_the_pinned_memory_that_streamed_weights_leave() -> None:
    work = replace(WORK, states=3 * GIB)
    assert can_pin(work, STREAMED, STREAMED + 3 * GIB, shared=False)
    assert not can_pin(work, STREAMED, STREAMED + 2 * GIB, shared=False)
    # If the streamed weights do not fit, they leave three tenths of the pinned memory to states:
    # 3.3 of 11 GiB, or 2.7 of 9 GiB.
    assert can_pin(work, STREAMED, 11 * GIB, shared=False)
    assert not can_pin(work, STREAMED, 9 * GIB, shared=False)
    # Shared weights that do not fit are not pinned at all, and leave all of it.
    assert can_pin(work, STREAMED, 3 * GIB, shared=True)


def test_the_environment_variable_limits_pinned_memory_if_it_is_an_integer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(pinned.LIMIT, raising=False)
    assert pinned_limit() == math.inf
    monkeypatch.setenv(pinned.LIMIT, "300000")
    assert pinned_limit() == 300000
    monkeypatch.setenv(pinned.LIMIT, "much")
    assert pinned_limit() == math.inf


class Group:
    """A group of this process and others; each of `counts` is the bytes another one could pin."""

    def __init__(self, *counts: int) -> None:
        self._messages = [json.dumps(count).encode() for count in counts]

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine, *self._messages]


@pytest.mark.parametrize(
    ("here", "others", "expected"),
    [
        # Bytes that this process could pin, those of the other processes, and those in the budget.
        (GIB - 5, (), GIB - 5),
        # The process with the least pinned memory decides for all processes of the run.
        (64 * GIB, (3 * GIB, 20 * GIB), 3 * GIB),
        # Each process can pin all that the probe asks for (`TRIED`, 4 GiB): there is no limit.
        (64 * GIB, (64 * GIB,), math.inf),
    ],
)
def test_a_probe_limits_the_budget_to_what_the_system_pins_in_every_process(
    monkeypatch: pytest.MonkeyPatch, here: int, others: tuple[int, ...], expected: float
) -> None:
    asked = []

    def pinnable(device: str, wanted: int) -> int:
        asked.append((device, wanted))
        return min(here, wanted)

    monkeypatch.setattr(_core, "cuda_pinnable_bytes", pinnable)
    plan = plan_of(WORK)
    lines: list[str] = []
    found = probed(BUDGET, plan, Group(*others), lines.append)  # type: ignore[arg-type]
    # The probe asks for only 4 of the 32 GiB of streamed weights, because pinning takes time.
    assert asked == [("cuda", TRIED)]
    assert TRIED < STREAMED
    assert found == replace(BUDGET, pinned=expected)
    assert all(line.startswith("plan: the system pins ") for line in lines)
    # One line tells of too little pinned memory; there is none if it suffices.
    assert len(lines) == (0 if expected == math.inf else 1)
    if lines:
        # The rate of the copies through the ring counts from now on.
        assert step_seconds(plan, found) > step_seconds(plan, BUDGET)


@pytest.mark.parametrize(
    ("work", "changes", "device"),
    [
        # A plan is probed only if it needs at least `PROBED` bytes, half a GiB.
        (replace(WORK, streamed=0.2 * GIB, modulation=0.2 * GIB), {}, "cuda"),
        # The eight processes that share the weights would each pin an eighth of them for the probe.
        # An eighth of 3 GiB is less than `PROBED`.
        (replace(WORK, streamed=3 * GIB, modulation=0), {"sharing": 8}, "cuda"),
        # The weights are in slices on the GPUs, or pinned memory is already limited to less than
        # `PROBED`, or there is no GPU.
        (WORK, {"peers": "nvlink"}, "cuda"),
        (WORK, {"pinned": PROBED - 1.0}, "cuda"),
        (WORK, {}, "cpu"),
    ],
)
def test_small_or_no_needs_are_not_probed(
    monkeypatch: pytest.MonkeyPatch, work: Work, changes: dict[str, Any], device: str
) -> None:
    # A probe would call None, which is an error.
    monkeypatch.setattr(_core, "cuda_pinnable_bytes", None)
    budget = replace(BUDGET, **changes)
    assert probed(budget, plan_of(work, device), Group(), print) is budget  # type: ignore[arg-type]


def test_a_probe_asks_for_states_and_for_offloaded_inputs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def pinnable(_: str, wanted: int) -> int:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(_core, "cuda_pinnable_bytes", pinnable)
    work = replace(WORK, streamed=0, modulation=0, states=GIB, offloaded=GIB // 2)
    probed(BUDGET, plan_of(work), Group(), print)  # type: ignore[arg-type]
    assert asked == [GIB + GIB // 2]
