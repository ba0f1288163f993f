"""Optimizer states in host memory: estimated memory and times, and when a plan puts them there."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import families, session
from trainable_candle.errors import ArgumentError, ConfigError, OutOfMemoryError
from trainable_candle.settings.checks import check_settings
from trainable_candle.tasks.budget import Budget, Plan, make_plan, step_seconds
from trainable_candle.tasks.estimate import RUNTIME_BYTES, Estimate, Item, trained_model
from trainable_candle.tasks.speed import GPUS, Work, seconds
from trainable_candle.train import TrainConfig

from .full_size import write_model

GIB = 2**30
CARD = GPUS["RTX 4090"]
# A step takes about 1.4 s. Everything but the states is 10 GiB.
WORK = Work(60e12, 15e12, 4e9, 0, 0, 0, 0, 0, 0, 0, False, False)
GROUPS = families.find("digits").groups


def estimates(states: float) -> Callable[[TrainConfig], Estimate]:
    """Estimates of a model that can save memory in two ways only.

    Checkpointing saves activations, and the states of the optimizer can be in host memory.
    """

    def estimate(config: TrainConfig) -> Estimate:
        kept = {"none": 4, "selective": 3}.get(config.checkpointing, 2)
        away = states if config.states_on_host else 0
        items = [
            Item("model", "weights", 6 * GIB - RUNTIME_BYTES),
            Item("model", "activations", kept * GIB),
            Item("model", "optimizer", int(states - away)),
        ]
        work = replace(WORK, states=away, recomputed=float(config.recomputes_all))
        return Estimate({"training": items}, True, work, int(away))

    return estimate


def plan(states: float, gib: float, budget: Budget | None = None, **changes: Any) -> Plan:
    config = TrainConfig(device="cuda", precision="bf16", **changes)
    budget = budget or Budget(gib * GIB, 64 * GIB, CARD)
    return make_plan(config, GROUPS, replace(budget, memory=gib * GIB), estimates(states))


def test_states_stay_on_the_gpu_where_they_fit() -> None:
    found = plan(2 * GIB, 12)
    assert (found.config.optimizer_states, found.chosen) == ("device", {})


def test_a_plan_prefers_what_costs_less_time() -> None:
    # Selective checkpointing also frees 1 GiB, and is predicted to cost nothing here.
    found = plan(GIB, 10)
    assert found.chosen == {"gradient_checkpointing": "selective"}


def test_states_go_to_the_host_where_nothing_faster_fits() -> None:
    there = Budget(10 * GIB, 64 * GIB, CARD)
    found = plan(2 * GIB, 10, gradient_checkpointing="none")
    assert found.chosen == {"optimizer_states": "host"}
    line = found.lines(there)[0]
    assert line.startswith("plan: --optimizer-states host (about 10.00 GiB, ")
    # Copying 2 GiB of states over the link to the GPU and back costs less than a second forward
    # pass.
    recomputed = replace(WORK, recomputed=1.0)
    assert 4 * GIB / 25e9 + seconds(WORK, CARD) < seconds(recomputed, CARD)
    free = plan(2 * GIB, 9)
    assert free.config.optimizer_states == "host"
    assert free.config.gradient_checkpointing == "selective"


def test_a_given_place_of_the_states_is_kept() -> None:
    with pytest.raises(OutOfMemoryError, match="the run needs about 14"):
        plan(4 * GIB, 9, optimizer_states="device")
    found = plan(2 * GIB, 40, optimizer_states="host")
    assert (found.config.optimizer_states, found.estimate.host) == ("host", 2 * GIB)


def test_states_must_fit_into_the_host() -> None:
    poor = Budget(0, GIB, CARD)
    with pytest.raises(OutOfMemoryError, match="memory of the host"):
        plan(4 * GIB, 8, poor)


def test_states_are_chosen_only_where_they_can_be_pinned() -> None:
    unpinned = Budget(0, 64 * GIB, CARD, pinned=GIB)
    assert plan(2 * GIB, 10, unpinned).config.gradient_checkpointing == "full"
    with pytest.raises(OutOfMemoryError, match="the run needs about 14"):
        plan(4 * GIB, 9, unpinned)
    assert plan(2 * GIB, 10, replace(unpinned, pinned=2 * GIB)).config.states_on_host


def test_the_link_is_crossed_twice_in_each_optimizer_step() -> None:
    there = Budget(9 * GIB, 64 * GIB, CARD)
    for count in (1, 4):
        made = plan(2 * GIB, 40, optimizer_states="host", gradient_accumulation=count)
        expected = count * seconds(WORK, CARD) + 4 * GIB / 25e9
        assert step_seconds(made, there) == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "muon"])
def test_the_estimate_moves_the_states_from_the_gpu_to_the_host(
    tmp_path: Path, optimizer: str
) -> None:
    facts = tc.inspect(write_model(tmp_path, "SDXL")).parts["unet"]
    adapter = tc.LoraConfig(r=64, target_modules=["to_q", "to_out.0"])
    count, states = adapter.plan(dict(facts.layers), optimizer)
    assert states > 2 * count
    found = {}
    for place in ("device", "host"):
        config = TrainConfig(device="cuda", precision="bf16", optimizer=optimizer)
        config = config.with_(optimizer_states=place)
        found[place] = trained_model("unet", facts, adapter, config, height=64, width=64, tokens=77)
    bytes_of = {k: sum(item.bytes for item in v.items) for k, v in found.items()}
    assert bytes_of["device"] - bytes_of["host"] == states
    assert found["host"].host - found["device"].host == states
    assert (found["host"].work.states, found["device"].work.states) == (states, 0)


def test_on_the_cpu_there_is_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="has no effect without --device cuda"):
        check_settings(TrainConfig(device="cpu", optimizer_states="host"))
    for states in ("auto", "device"):
        check_settings(TrainConfig(device="cpu", optimizer_states=states))
    config = TrainConfig(device="cpu", precision="f32", gradient_checkpointing="full")
    made = make_plan(config, GROUPS, Budget(math.inf, math.inf), estimates(GIB))
    assert made.config.optimizer_states == "auto"


def test_arguments_of_the_optimizer_cannot_contradict_the_setting() -> None:
    with pytest.raises(ConfigError, match="--optimizer-states"):
        TrainConfig(optimizer_args=["states=1"])


@pytest.mark.parametrize("kind", tc.optim.KINDS)
def test_optimizers_on_the_cpu_accept_the_argument(kind: str) -> None:
    results = []
    for states in ("device", "host"):
        var = tc.Var(tc.ones(4, 3))
        optimizer = tc.optim.KINDS[kind]([var], lr=0.1, states=states)
        for step in range(3):
            var.grad = tc.ones(4, 3) * (step + 1.0)
            optimizer.step()
        results.append(var.detach().numpy())
    assert (results[0] == results[1]).all()
    with pytest.raises(ArgumentError, match=r'found states "disk", expected "device" or "host"'):
        tc.optim.KINDS[kind]([var], states="disk")


def test_a_run_without_pinned_memory_keeps_states_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def make(config: TrainConfig, groups: Any) -> Any:
        asked.append(config.optimizer_states)
        if config.states_on_host:
            raise OutOfMemoryError("AdamW: the system gives no further 2.0 MiB of pinned memory")
        return SimpleNamespace(groups=groups)

    monkeypatch.setattr(session, "make_optimizer", make)
    lines: list[str] = []
    config = TrainConfig(device="cuda", optimizer_states="host")
    assert session._optimizer(config, [], lines.append).groups == []
    assert asked == ["host", "device"]
    (line,) = lines
    assert "in GPU memory, not in host memory, because the system gives too little pinned" in line


def test_a_run_whose_gpu_is_full_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> Any:
        raise OutOfMemoryError("AdamW: the device is out of memory")

    monkeypatch.setattr(session, "make_optimizer", make)
    config = TrainConfig(device="cuda", optimizer_states="host")
    with pytest.raises(OutOfMemoryError, match="the device is out of memory"):
        session._optimizer(config, [], print)
