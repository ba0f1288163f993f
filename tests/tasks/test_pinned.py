"""Predicted times of steps where the system gives too little pinned memory for streamed weights.

The GPU reads pinned weights directly. A thread of the host first copies other weights into a small
ring of pinned buffers.
"""

import math
from dataclasses import replace

import pytest

from trainable_candle.tasks import pinned
from trainable_candle.tasks.budget import Budget, Plan, step_seconds
from trainable_candle.tasks.estimate import Estimate, Item
from trainable_candle.tasks.pinned import HOST_COPY, can_pin, pinned_limit, ring_share, with_ring
from trainable_candle.tasks.speed import GPUS, Work, seconds
from trainable_candle.train import TrainConfig

GIB = 2**30
# The copies take much longer than the computation, so they determine the time.
WORK = Work(1e9, 1e8, 1e6, False, 0, 30 * GIB, 2 * GIB, 0, 0, 8, True, False)
STREAMED = WORK.streamed + WORK.modulation


def paced(gpu: str, limit: float, **changes: int | str) -> float:
    """The predicted seconds of a step."""
    budget = Budget(24 * GIB, 64 * GIB, GPUS[gpu], pinned=limit)
    found = Estimate({"training": [Item("", "", 0)]}, True, WORK, int(STREAMED))
    plan = Plan(TrainConfig(device="cuda", precision="bf16"), found, {})
    return step_seconds(plan, replace(budget, **changes))


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


def test_the_limit_is_that_of_the_variable_or_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pinned.LIMIT, raising=False)
    monkeypatch.setattr(pinned, "is_wsl", lambda: False)
    assert pinned_limit() == math.inf
    monkeypatch.setenv(pinned.LIMIT, "300000")
    assert pinned_limit() == 300000
    monkeypatch.setenv(pinned.LIMIT, "much")
    assert pinned_limit() == math.inf
    monkeypatch.setattr(pinned, "is_wsl", lambda: True)
    assert pinned_limit() == GIB
    monkeypatch.setenv(pinned.LIMIT, "300000")
    assert pinned_limit() == 300000
