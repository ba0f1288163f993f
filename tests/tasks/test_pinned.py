"""Predicted times of steps where the system gives too little pinned memory for streamed weights.

The GPU reads pinned weights directly. A thread of the host first copies other weights into a small
ring of pinned buffers.
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
WORK = Work(1e9, 1e8, 1e6, 0, 0, 30 * GIB, 2 * GIB, 0, 0, 8, True, False)
STREAMED = WORK.streamed + WORK.modulation


BUDGET = Budget(24 * GIB, 64 * GIB, GPUS["RTX 4090"])


def plan_of(work: Work, device: str = "cuda") -> Plan:
    found = Estimate({"training": [Item("", "", 0)]}, True, work, int(STREAMED))
    return Plan(TrainConfig(device=device, precision="bf16"), found, {})


def paced(gpu: str, limit: float, **changes: int | str) -> float:
    """The predicted seconds of a step."""
    budget = Budget(24 * GIB, 64 * GIB, GPUS[gpu], pinned=limit)
    return step_seconds(plan_of(WORK), replace(budget, **changes))


def test_with_enough_pinned_memory_nothing_changes() -> None:
    for limit in (STREAMED, math.inf):
        assert paced("RTX 4090", limit) == seconds(WORK, GPUS["RTX 4090"])


@pytest.mark.parametrize("gpu", ["RTX 4060 Ti", "RTX 4090", "RTX 5090"])
def test_without_pinned_memory_the_slower_copy_counts(gpu: str) -> None:
    rate = min(GPUS[gpu].link, HOST_COPY)
    expected = (2 * WORK.streamed + WORK.modulation) / rate
    assert paced(gpu, 0) == pytest.approx(expected, rel=1e-3)
    slow = replace(GPUS[gpu], link=0.5 * HOST_COPY)
    assert with_ring(slow, 1.0).streams == pytest.approx(slow.link)


def test_seven_tenths_of_a_limited_amount_stay_pinned() -> None:
    share = 1 - 0.7 * 16 * GIB / STREAMED
    assert ring_share(STREAMED, 16 * GIB, shared=False) == pytest.approx(share)
    link = GPUS["RTX 4090"].link
    copied = 2 * WORK.streamed + WORK.modulation
    expected = copied * (share / HOST_COPY + (1 - share) / link)
    assert paced("RTX 4090", 16 * GIB) == pytest.approx(expected, rel=1e-3)


def test_shared_weights_are_pinned_as_a_whole_or_not_at_all() -> None:
    assert paced("RTX 4090", 16 * GIB, sharing=2) == paced("RTX 4090", 0)
    assert paced("RTX 4090", STREAMED, sharing=2) == paced("RTX 4090", math.inf)
    # Weights that the GPUs have in slices need no pinned memory.
    assert paced("RTX 4090", 0, peers="nvlink") == paced("RTX 4090", math.inf, peers="nvlink")


def test_states_take_what_streamed_weights_leave() -> None:
    states = replace(WORK, states=3 * GIB)
    assert can_pin(states, STREAMED, STREAMED + 3 * GIB, shared=False)
    assert not can_pin(states, STREAMED, STREAMED + 2 * GIB, shared=False)
    # Streamed weights that do not fit leave three tenths of the pinned memory to states.
    assert can_pin(states, STREAMED, 11 * GIB, shared=False)
    assert not can_pin(states, STREAMED, 9 * GIB, shared=False)
    assert can_pin(states, STREAMED, 3 * GIB, shared=True)


def test_the_limit_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pinned.LIMIT, raising=False)
    assert pinned_limit() == math.inf
    monkeypatch.setenv(pinned.LIMIT, "300000")
    assert pinned_limit() == 300000
    monkeypatch.setenv(pinned.LIMIT, "much")
    assert pinned_limit() == math.inf


class Others:
    """A group of processes; the other processes found `others` bytes."""

    def __init__(self, *others: int) -> None:
        self.others = [json.dumps(count).encode() for count in others]

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine, *self.others]


@pytest.mark.parametrize(
    ("there", "others", "expected"),
    [
        (GIB - 5, (), GIB - 5),
        # The process with the least pinned memory decides for all processes of the run.
        (64 * GIB, (3 * GIB, 20 * GIB), 3 * GIB),
        (64 * GIB, (64 * GIB,), math.inf),
    ],
)
def test_a_probe_finds_what_the_system_pins(
    monkeypatch: pytest.MonkeyPatch, there: int, others: tuple[int, ...], expected: float
) -> None:
    asked = []

    def pinnable(device: str, wanted: int) -> int:
        asked.append((device, wanted))
        return min(there, wanted)

    monkeypatch.setattr(_core, "cuda_pinnable_bytes", pinnable)
    plan = plan_of(WORK)
    told: list[str] = []
    found = probed(BUDGET, plan, Others(*others), told.append)  # type: ignore[arg-type]
    # The probe asks for only 4 of the 32 GiB, because pinning takes time.
    assert asked == [("cuda", TRIED)]
    assert TRIED < STREAMED
    assert found == replace(BUDGET, pinned=expected)
    assert [line.startswith("plan: the system pins ") for line in told] == [True] * len(told)
    assert len(told) == (expected != math.inf)
    if told:
        # The rate of the copies through the ring counts from now on.
        assert step_seconds(plan, found) > step_seconds(plan, BUDGET)


@pytest.mark.parametrize(
    ("work", "changes", "device"),
    [
        (replace(WORK, streamed=0.2 * GIB, modulation=0.2 * GIB), {}, "cuda"),
        # Each of the processes that share the weights pins its part of them for the probe.
        (replace(WORK, streamed=3 * GIB, modulation=0), {"sharing": 8}, "cuda"),
        (WORK, {"peers": "nvlink"}, "cuda"),
        (WORK, {"pinned": PROBED - 1.0}, "cuda"),
        (WORK, {}, "cpu"),
    ],
)
def test_small_needs_are_not_probed(
    monkeypatch: pytest.MonkeyPatch, work: Work, changes: dict[str, Any], device: str
) -> None:
    monkeypatch.setattr(_core, "cuda_pinnable_bytes", None)
    before = replace(BUDGET, **changes)
    assert probed(before, plan_of(work, device), Others(), print) is before  # type: ignore[arg-type]


def test_a_probe_asks_for_states_and_for_offloaded_inputs_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def pinnable(_: str, wanted: int) -> int:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(_core, "cuda_pinnable_bytes", pinnable)
    work = replace(WORK, streamed=0, modulation=0, states=GIB, offloaded=GIB // 2)
    probed(BUDGET, plan_of(work), Others(), print)  # type: ignore[arg-type]
    assert asked == [GIB + GIB // 2]
