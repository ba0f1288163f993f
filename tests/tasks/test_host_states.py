"""Optimizer states in host memory: estimates of memory and time, and plans that put them there."""

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
from trainable_candle.tasks.speed import GPUS, seconds
from trainable_candle.train import TrainConfig

from .full_size import write_model
from .works import work_without_blocks

GIB = 2**30
CARD = GPUS["RTX 4090"]
# Floating-point operations of the layers and of attention, and bytes of activations that the tape
# keeps. A step on CARD takes about 1.4 s.
WORK = work_without_blocks(layers=60e12, attention=15e12, kept=4e9)
GROUPS = families.find("digits").groups


def estimates(states: float) -> Callable[[TrainConfig], Estimate]:
    """Return a function that estimates a run with `states` bytes of optimizer states.

    Without checkpointing, the rest of the run takes 10 GiB. Only two choices save GPU memory:
    checkpointing keeps fewer activations, and the states can be in host memory.
    """

    def estimate(config: TrainConfig) -> Estimate:
        activations_gib = {"none": 4, "selective": 3}.get(config.checkpointing, 2)  # 2: "full"
        on_host = states if config.states_on_host else 0
        items = [
            # `Estimate.peak` adds `RUNTIME_BYTES`.
            Item("model", "weights", 6 * GIB - RUNTIME_BYTES),
            Item("model", "activations", activations_gib * GIB),
            Item("model", "optimizer", int(states - on_host)),
        ]
        work = replace(WORK, states=on_host, recomputed=float(config.recomputes_all))
        return Estimate({"training": items}, on_gpu=True, work=work, host=int(on_host))

    return estimate


def plan(states: float, gib: float, budget: Budget | None = None, **changes: Any) -> Plan:
    """Return the plan for `gib` GiB of GPU memory and the other limits of `budget`.

    Without `budget`, 64 GiB of host memory are free. `changes` are settings that the plan keeps.
    """
    config = TrainConfig(device="cuda", precision="bf16", **changes)
    budget = budget or Budget(memory=0, host=64 * GIB, rates=CARD)
    return make_plan(config, GROUPS, replace(budget, memory=gib * GIB), estimates(states))


def test_states_stay_on_the_gpu_where_they_fit() -> None:
    found = plan(2 * GIB, 12)
    assert (found.config.optimizer_states, found.chosen) == ("device", {})


def test_a_plan_prefers_what_costs_less_time() -> None:
    # One GiB is missing. Selective checkpointing frees it, and is predicted to cost nothing here.
    found = plan(GIB, 10)
    assert found.chosen == {"gradient_checkpointing": "selective"}


def test_states_go_to_the_host_where_nothing_faster_fits() -> None:
    limits = Budget(memory=10 * GIB, host=64 * GIB, rates=CARD)
    found = plan(2 * GIB, 10, gradient_checkpointing="none")
    assert found.chosen == {"optimizer_states": "host"}
    line = found.lines(limits)[0]
    assert line.startswith("plan: --optimizer-states host (about 10.00 GiB, ")
    # Copying 2 GiB of states over the link (25 GB/s) to the GPU and back takes less time than
    # recomputing the forward pass.
    recomputed = replace(WORK, recomputed=1.0)
    assert 4 * GIB / 25e9 + seconds(WORK, CARD) < seconds(recomputed, CARD)
    found = plan(2 * GIB, 9)
    assert found.config.optimizer_states == "host"
    assert found.config.gradient_checkpointing == "selective"


def test_a_given_place_of_the_states_is_kept() -> None:
    # The message has the need before the plan saves memory: 10 GiB and the states.
    with pytest.raises(OutOfMemoryError, match="the run needs about 14"):
        plan(4 * GIB, 9, optimizer_states="device")
    found = plan(2 * GIB, 40, optimizer_states="host")
    assert (found.config.optimizer_states, found.estimate.host) == ("host", 2 * GIB)


def test_states_must_fit_into_the_host() -> None:
    little_host = Budget(memory=0, host=GIB, rates=CARD)  # `plan` replaces the 0
    with pytest.raises(OutOfMemoryError, match="memory of the host"):
        plan(4 * GIB, 8, little_host)


def test_states_go_to_the_host_only_where_they_can_be_pinned() -> None:
    little_pinned = Budget(memory=0, host=64 * GIB, rates=CARD, pinned=GIB)
    # The states need 2 GiB of pinned memory, so the plan chooses full checkpointing instead.
    assert plan(2 * GIB, 10, little_pinned).config.gradient_checkpointing == "full"
    with pytest.raises(OutOfMemoryError, match="the run needs about 14"):
        plan(4 * GIB, 9, little_pinned)
    assert plan(2 * GIB, 10, replace(little_pinned, pinned=2 * GIB)).config.states_on_host


def test_an_optimizer_step_copies_the_states_twice_however_many_micro_batches_it_has() -> None:
    # `step_seconds` does not depend on the memory in `limits`.
    limits = Budget(memory=9 * GIB, host=64 * GIB, rates=CARD)
    for micro_batches in (1, 4):
        found = plan(2 * GIB, 40, optimizer_states="host", gradient_accumulation=micro_batches)
        # 2 GiB to the GPU and back over the link (25 GB/s).
        expected = micro_batches * seconds(WORK, CARD) + 4 * GIB / 25e9
        assert step_seconds(found, limits) == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw", "muon"])
def test_the_estimate_moves_the_states_from_the_gpu_to_the_host(
    tmp_path: Path, optimizer: str
) -> None:
    facts = tc.inspect(write_model(tmp_path, "SDXL")).parts["unet"]
    adapter = tc.LoraConfig(r=64, target_modules=["to_q", "to_out.0"])
    parameters, states = adapter.plan(dict(facts.layers), optimizer)
    # Every optimizer here has at least two bytes of states per parameter (two 8-bit codes).
    assert states > 2 * parameters
    trained = {}
    for place in ("device", "host"):
        config = TrainConfig(device="cuda", precision="bf16", optimizer=optimizer)
        config = config.with_(optimizer_states=place)
        trained[place] = trained_model(
            "unet", facts, adapter, config, height=64, width=64, tokens=77
        )
    bytes_of = {place: sum(item.bytes for item in each.items) for place, each in trained.items()}
    assert bytes_of["device"] - bytes_of["host"] == states
    assert trained["host"].host - trained["device"].host == states
    assert (trained["host"].work.states, trained["device"].work.states) == (states, 0)


def test_on_the_cpu_there_is_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="has no effect without --device cuda"):
        check_settings(TrainConfig(device="cpu", optimizer_states="host"))
    for place in ("auto", "device"):
        check_settings(TrainConfig(device="cpu", optimizer_states=place))
    config = TrainConfig(device="cpu", precision="f32", gradient_checkpointing="full")
    found = make_plan(config, GROUPS, Budget(math.inf, math.inf), estimates(GIB))
    assert found.config.optimizer_states == "auto"


def test_the_place_of_states_is_no_argument_of_the_optimizer() -> None:
    with pytest.raises(ConfigError, match="--optimizer-states"):
        TrainConfig(optimizer_args=["states=1"])


@pytest.mark.parametrize("kind", tc.optim.KINDS)
def test_an_optimizer_on_the_cpu_accepts_both_places_and_gives_the_same_results(kind: str) -> None:
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
    tried: list[str] = []

    def make(config: TrainConfig, groups: Any) -> Any:
        tried.append(config.optimizer_states)
        if config.states_on_host:
            raise OutOfMemoryError("AdamW: the system gives no further 2.0 MiB of pinned memory")
        return SimpleNamespace(groups=groups)

    monkeypatch.setattr(session, "make_optimizer", make)
    lines: list[str] = []
    config = TrainConfig(device="cuda", optimizer_states="host")
    assert session._optimizer(config, [], lines.append).groups == []
    assert tried == ["host", "device"]
    (line,) = lines
    assert "in GPU memory, not in host memory, because the system gives too little pinned" in line


def test_a_run_whose_gpu_is_full_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> Any:
        raise OutOfMemoryError("AdamW: the device is out of memory")

    monkeypatch.setattr(session, "make_optimizer", make)
    config = TrainConfig(device="cuda", optimizer_states="host")
    with pytest.raises(OutOfMemoryError, match="the device is out of memory"):
        session._optimizer(config, [], print)
