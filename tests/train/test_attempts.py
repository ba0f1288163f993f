"""Lines of the log about a run whose memory was predicted wrongly, and the limit of `--vram`."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.attempts import StepCounter, run_planned
from trainable_candle.tasks.budget import Budget, Plan, find_budget
from trainable_candle.tasks.estimate import GIB, RUNTIME_BYTES, Estimate, Item
from trainable_candle.train import TrainConfig


@pytest.fixture
def gpu_stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return the memory statistics of a simulated GPU; a test sets `peak_reserved`."""
    stats: dict[str, int] = {}
    monkeypatch.setattr(tc.cuda, "memory_stats", lambda _device: stats)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(tc.cuda, name, lambda _device: stats.clear())
    return stats


def plan(gib: float, policy: str = "none") -> Plan:
    """Return a plan that predicts `gib` GiB, with a policy of gradient checkpointing."""
    # The estimate adds RUNTIME_BYTES to the items.
    items = [Item("unet", "weights", int(gib * GIB) - RUNTIME_BYTES)]
    config = TrainConfig(device="cuda", gradient_checkpointing=policy)
    return Plan(config, Estimate({"training": items}, on_gpu=True), {})


def attempt(
    gpu_stats: dict[str, int], peaks: list[float], first: Plan, second: Plan | None = None
) -> list[str]:
    """Return the lines of the log about a run with the plan `first`.

    Its attempts have the peaks `peaks`, in GiB. All but the last attempt run out of memory. A
    second attempt has the plan `second`.
    """
    lines: list[str] = []
    remaining = list(peaks)

    def run(_config: TrainConfig) -> None:
        # The statistics are reset before each attempt.
        assert not gpu_stats
        gpu_stats["peak_reserved"] = int(remaining.pop(0) * GIB)
        if remaining:
            raise tc.OutOfMemoryError("matmul: there is too little")

    def replan(_budget: Budget) -> Plan:
        assert second is not None
        return second

    budget = Budget(memory=24 * GIB, host=24 * GIB)
    run_planned(
        run, first, budget, replan, StepCounter(), may_repeat=lambda: True, report=lines.append
    )
    return lines


# Up to 5 % more than predicted counts as good.
@pytest.mark.parametrize("used", [9.0, 10.4])
def test_no_line_reports_a_good_prediction(gpu_stats: dict[str, int], used: float) -> None:
    assert attempt(gpu_stats, [used], plan(10)) == []


def test_a_run_that_takes_more_memory_than_predicted_reports_it(gpu_stats: dict[str, int]) -> None:
    assert attempt(gpu_stats, [11.2], plan(10)) == [
        "plan: the run took 11.20 GiB of GPU memory, where 10.00 GiB were predicted (12 % more)"
    ]


def test_when_memory_runs_out_the_log_has_the_prediction_and_the_new_plan(
    gpu_stats: dict[str, int],
) -> None:
    # The new plan has another policy, because a plan with the same settings is not tried again.
    missed, out, *table = attempt(gpu_stats, [12, 9], plan(10), plan(9, "full"))
    assert missed == (
        "plan: the run had taken 12.00 GiB of GPU memory when memory ran out, where 10.00 GiB were "
        "predicted (20 % more)"
    )
    assert out == "plan: memory ran out after 0 steps: matmul: there is too little"
    assert table[0] == "GPU memory while training: 9.00 GiB"


def test_running_out_of_memory_after_twenty_steps_is_reported_without_a_new_plan(
    gpu_stats: dict[str, int],
) -> None:
    lines: list[str] = []
    counter = StepCounter()

    def run(_config: TrainConfig) -> None:
        # A run that runs out of memory gets a new plan only if it has done fewer than 20 steps.
        counter.steps = 20
        gpu_stats["peak_reserved"] = 8 * GIB
        raise tc.OutOfMemoryError("matmul: there is too little")

    def no_plan(_budget: Budget) -> Any:
        raise AssertionError

    with pytest.raises(tc.OutOfMemoryError):
        run_planned(
            run,
            plan(10),
            Budget(memory=24 * GIB, host=0),
            no_plan,
            counter,
            may_repeat=lambda: True,
            report=lines.append,
        )
    (line,) = lines
    assert line.startswith("plan: the run had taken 8.00 GiB of GPU memory when memory ran out")
    assert line.endswith("where 10.00 GiB were predicted (20 % less)")


# A run that has saved something may not be repeated.
@pytest.mark.parametrize(("may_repeat", "expected"), [(True, 2), (False, 1)])
def test_a_run_is_planned_anew_before_twenty_steps_and_before_it_saves(
    gpu_stats: dict[str, int], may_repeat: bool, expected: int
) -> None:
    counter, attempts = StepCounter(), 0

    def run(_config: TrainConfig) -> None:
        nonlocal attempts
        attempts += 1
        gpu_stats["peak_reserved"] = 8 * GIB
        if attempts == 1:
            counter.steps = 19
            raise tc.OutOfMemoryError("matmul: there is too little")

    first, second = plan(10), plan(9, "full")
    with nullcontext() if expected == 2 else pytest.raises(tc.OutOfMemoryError):
        run_planned(
            run,
            first,
            Budget(24 * GIB, 0),
            lambda _: second,
            counter,
            lambda: may_repeat,
            lambda _: None,
        )
    assert attempts == expected


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Simulate a GPU; return the limits of memory that are set on it, in their order."""
    stats = {"free": 24 * GIB, "reserved": 0, "allocated": 0, "peak_reserved": GIB}
    monkeypatch.setattr(tc.cuda, "memory_stats", lambda _device: stats)
    monkeypatch.setattr(tc.cuda, "get_device_name", lambda _device: "Simulated GPU")
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(tc.cuda, name, lambda _device: None)
    found: list[int | None] = []

    def set_memory_limit(limit: int | None, device: str) -> None:
        assert device == "cuda"
        found.append(limit)

    monkeypatch.setattr(tc.cuda, "set_memory_limit", set_memory_limit)
    return found


def limits_of_attempts(limits: list[int | None], vram: float | None, fails: int) -> list[Any]:
    """Return, for each attempt of a run, the limits that have been set before it starts.

    The first `fails` attempts run out of memory.
    """
    config = TrainConfig(device="cuda", vram=vram)
    group: Any = SimpleNamespace(size=1, local_size=1, exchange=lambda message: [message])
    estimate = Estimate({"training": [Item("unet", "weights", 2 * GIB)]}, on_gpu=True)
    full = config.with_(gradient_checkpointing="full")
    plans = Plan(config, estimate, {}), Plan(full, estimate, {})
    starts: list[Any] = []

    def run(_config: TrainConfig) -> None:
        starts.append(list(limits))
        if len(starts) <= fails:
            raise tc.OutOfMemoryError("matmul: there is too little")

    run_planned(
        run,
        plans[0],
        find_budget(group, config),
        lambda _budget: plans[1],
        StepCounter(),
        lambda: True,
        lambda _: None,
    )
    return starts


# Tensors get the smaller of two sizes, less 200 MiB for kernels and workspaces: `vram` less the 512
# MiB that CUDA itself takes, or the 24 GiB that are free after CUDA has taken its own memory.
@pytest.mark.parametrize(("vram", "mib"), [(6.0, 6 * 1024 - 712), (64.0, 24 * 1024 - 200)])
def test_vram_limits_tensors_before_anything_is_loaded_and_until_the_run_ends(
    limits: list[int | None], vram: float, mib: int
) -> None:
    assert limits_of_attempts(limits, vram, fails=0) == [[mib * 2**20]]
    assert limits == [mib * 2**20, None]


def test_the_limit_of_vram_stays_for_a_second_attempt(limits: list[int | None]) -> None:
    limit = (6 * 1024 - 712) * 2**20
    assert limits_of_attempts(limits, 6.0, fails=1) == [[limit], [limit]]
    assert limits == [limit, None]


def test_the_limit_of_vram_is_removed_after_a_run_that_fails(limits: list[int | None]) -> None:
    with pytest.raises(tc.OutOfMemoryError):
        limits_of_attempts(limits, 6.0, fails=2)
    assert limits[-1] is None
    assert len(limits) == 2


def test_without_vram_no_limit_is_set(limits: list[int | None]) -> None:
    assert limits_of_attempts(limits, None, fails=0) == [[]]
    assert limits == []
