"""Recomputation of a part of the blocks: estimates, plans and settings."""

from pathlib import Path
from typing import Any

import pytest

from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.settings.checks import check_settings
from trainable_candle.tasks.budget import Plan, make_plan, step_seconds
from trainable_candle.tasks.estimate import GIB, Estimate, trained_model
from trainable_candle.tasks.speed import GPUS, seconds
from trainable_candle.train import TrainConfig

from .measured_runs import FLUX, ROWS, SDXL, Run, facts_of
from .test_budget import Model, budget

# The name of a model, its family, and the sizes of an input (for a language model, the tokens).
MODELS = [("Flux.1-dev", "flux", FLUX), ("SDXL", "sdxl", SDXL), ("Llama-3-8B", "causal-lm", ROWS)]


def predicted(folder: Path, run: Run) -> tuple[float, float]:
    """Return the predicted peak of a run in GiB, and the predicted seconds of its step."""
    facts = facts_of(folder, run.model)
    trained = trained_model("model", facts, run.adapter(), run.config(), **run.sizes)
    peak = Estimate({"training": trained.items}, on_gpu=True).peak / GIB
    return peak, seconds(trained.work, GPUS["H100"])


@pytest.mark.parametrize("policy", ["full", "offload"])
@pytest.mark.parametrize(("model", "family", "sizes"), MODELS, ids=str)
def test_recomputing_more_blocks_takes_less_memory_and_more_time(
    tmp_path: Path, model: str, family: str, sizes: dict[str, int], policy: str
) -> None:
    def peak_and_seconds(**settings: Any) -> tuple[float, float]:
        run = Run(model, family, sizes, settings, peak=0, step=None)  # nothing was measured
        return predicted(tmp_path, run)

    blocks = facts_of(tmp_path, model).blocks_to_checkpoint
    # Without a number of blocks, `selective` applies to all, and no whole block is recomputed. With
    # a number, `policy` applies to this many blocks, and `selective` to the others.
    none = peak_and_seconds(gradient_checkpointing="selective")
    by_count = [
        peak_and_seconds(gradient_checkpointing=policy, checkpoint_blocks=count)
        for count in (blocks // 4, blocks // 2, 3 * blocks // 4, blocks)
    ]
    every = peak_and_seconds(gradient_checkpointing=policy)
    assert by_count[-1] == every
    peaks, times = zip(none, *by_count, strict=True)
    assert list(peaks) == sorted(peaks, reverse=True)
    assert list(times) == sorted(times)
    # Recomputing half of the blocks saves about half of what recomputing all of them saves.
    peak_of_none, _, peak_of_half, _, peak_of_every = peaks
    saved = (peak_of_none - peak_of_half) / (peak_of_none - peak_of_every)
    assert 0.4 < saved < 0.75


def test_plans_recompute_only_as_many_blocks_as_needed(tmp_path: Path) -> None:
    model = Model(tmp_path, "Flux.1-dev")
    limits = budget(16, "RTX 4090")  # GiB
    # With the streaming given, the plan chooses how much to recompute.
    found = model.plan(limits, stream_blocks=42, stream_modulation=True)
    count = found.chosen["checkpoint_blocks"]
    assert 1 <= count < 57  # the number of blocks
    assert found.estimate.peak <= limits.planned
    flags = f"--gradient-checkpointing {found.config.checkpointing} --checkpoint-blocks {count} "
    assert flags in found.lines(limits)[0]
    # With one block fewer, the run does not fit, and recomputing all blocks takes longer.
    estimate = model.estimate(found.config, limits.memory)
    fewer, every = (found.config.with_(checkpoint_blocks=n) for n in (count - 1, None))
    assert estimate(fewer).peak > limits.planned
    plan_for_every = Plan(every, estimate(every), chosen={})
    assert step_seconds(plan_for_every, limits) > step_seconds(found, limits)


def test_a_given_policy_is_for_all_blocks_or_the_given_number(tmp_path: Path) -> None:
    model = Model(tmp_path, "Flux.1-dev")
    found = model.plan(budget(24, "RTX 4090"), gradient_checkpointing="full")
    assert found.config.checkpoint_blocks is None
    given = {"gradient_checkpointing": "full", "checkpoint_blocks": 20}
    found = model.plan(budget(24, "RTX 4090"), **given)
    assert {name: getattr(found.config, name) for name in given} == given
    assert not found.chosen.keys() & given.keys()


def test_planning_makes_under_two_thirds_of_estimates_for_a_part_of_the_blocks(
    tmp_path: Path,
) -> None:
    model = Model(tmp_path, "Flux.1-dev")
    limits = budget(12, "RTX 4090")
    config = model.config()
    untracked_estimate = model.estimate(config, limits.memory)
    tried: list[TrainConfig] = []

    def estimate(other: TrainConfig) -> Estimate:
        tried.append(other)
        return untracked_estimate(other)

    make_plan(config, model.family.groups, limits, estimate)
    for_some_blocks = sum(other.checkpoint_blocks is not None for other in tried)
    # Less than twice the other estimates, so less than two thirds of all.
    assert 0 < for_some_blocks < 2 * (len(tried) - for_some_blocks)


def test_more_blocks_than_there_are_is_an_error(tmp_path: Path) -> None:
    model = Model(tmp_path, "Flux.1-dev")
    given = {"gradient_checkpointing": "full", "checkpoint_blocks": 58}  # the model has 57
    with pytest.raises(ArgumentError, match="found 58 blocks to recompute, expected at most 57"):
        model.plan(budget(24), **given)


@pytest.mark.parametrize("policy", ["auto", "none", "selective"])
def test_a_number_of_blocks_needs_a_policy_that_recomputes(policy: str) -> None:
    config = TrainConfig(device="cuda", gradient_checkpointing=policy, checkpoint_blocks=4)
    message = "--checkpoint-blocks has no effect without --gradient-checkpointing full or offload"
    with pytest.raises(ConfigError, match=message):
        check_settings(config)
