"""A plan is the fastest choice that fits; `--batch-size auto` is the largest worthwhile batch."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from trainable_candle import families
from trainable_candle.settings.machine import SAME
from trainable_candle.tasks.budget import Budget, Plan, make_plan, step_seconds
from trainable_candle.tasks.estimate import RUNTIME_BYTES, Estimate, Item
from trainable_candle.tasks.speed import Rates
from trainable_candle.train import TrainConfig

from .test_budget import GIB, Model, budget
from .works import work_without_blocks

# What docs/memory.md adds to the time of a step whose base is rounded, or whose states are in host
# memory.
ROUNDED = {SAME: 1.0, "int8": 1.10, "nf4": 1.25}
ON_HOST = {"device": 1.0, "host": 1.05}


def choices(estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Yield combinations of settings. Of the blocks, none, half or all are streamed."""
    work = estimate.work
    assert work is not None
    half = work.checkpointed // 2
    # `gradient_checkpointing` and `checkpoint_blocks`.
    policies = [("none", None), ("selective", None), ("full", None), ("offload", half)]
    modulation = True if work.has_modulation else None
    # `stream_modulation` and `stream_blocks`.
    streams = [(None, None), *product([modulation], (work.blocks // 2, work.blocks))]
    # `base_precision` and `optimizer_states`.
    places = [*product(ROUNDED, ["device"]), (SAME, "host")]
    for policy, stream, (base, states) in product(policies, streams, places):
        yield {
            "gradient_checkpointing": policy[0],
            "checkpoint_blocks": policy[1],
            "base_precision": base,
            "stream_modulation": stream[0],
            "stream_blocks": stream[1],
            "optimizer_states": states,
        }


def cost(plan: Plan, limits: Budget, choice: Mapping[str, Any]) -> float:
    """Return the predicted time of a step with what docs/memory.md adds to it."""
    factors = ROUNDED[choice["base_precision"]] * ON_HOST[choice["optimizer_states"]]
    return step_seconds(plan, limits) * factors


@pytest.mark.parametrize(
    ("model", "gib", "gpu"),
    [
        ("Llama-3-8B", 8, "RTX 4090"),
        ("Qwen2-1.5B", 4, "H200"),
        ("Z-Image", 12, "RTX 3060"),
        ("FLUX.2-klein-4B", 6, "RTX 4060 Ti"),
        ("SD3.5-medium", 6, "H200"),
    ],
)
def test_no_combination_that_fits_is_faster(tmp_path: Path, model: str, gib: int, gpu: str) -> None:
    limits, full_size = budget(gib, gpu), Model(tmp_path, model)
    found = full_size.plan(limits)
    assert found.estimate.peak <= limits.memory
    chosen = {"base_precision": SAME, "optimizer_states": "device"} | dict(found.chosen)
    least = cost(found, limits, chosen)
    estimate = full_size.estimate(full_size.config(), limits.memory)
    texts, fitting = found.config.text_encoder_precision, []
    combinations = list(choices(found.estimate))
    for choice in combinations:
        config = full_size.config(text_encoder_precision=texts, **choice)
        other = Plan(config, estimate(config), chosen={})
        if other.estimate.peak <= limits.memory and other.estimate.host <= limits.host:
            fitting.append((cost(other, limits, choice), choice))
    # The comparison means little unless several combinations fit, and several do not.
    assert 5 < len(fitting) < len(combinations) - 5
    fastest, choice = min(fitting, key=lambda pair: pair[0])
    assert least <= fastest, choice
    # With less rounded text encoders, not even the choice with the least memory fits: the last
    # combination offloads, streams all blocks and has its states on the host.
    smallest = {**combinations[-1], "base_precision": "nf4", "checkpoint_blocks": None}
    order = [SAME, "int8", "nf4"]
    # A language model has no text encoders.
    less_rounded = [] if full_size.family.name == "causal-lm" else order[: order.index(texts)]
    for text in less_rounded:
        config = full_size.config(text_encoder_precision=text, **smallest)
        assert estimate(config).peak > limits.memory


# A batch takes a constant time and a time for each sample. Here, the time of a sample is a given
# multiple of the constant time. Traffic and copies are so fast that they take no time.
LINEAR = Rates(products=1e12, memory=1e30, link=1e30)


def linear(per_sample: float) -> Callable[[TrainConfig], Estimate]:
    """Return a function that estimates a run; a sample takes 1 GiB and `per_sample` seconds."""

    def estimate(config: TrainConfig) -> Estimate:
        # The forward and the backward pass take two times the operations of the layers.
        layers = config.batch_size * per_sample * 1e12 / 2
        items = [Item("model", "activations", config.batch_size * GIB)]
        work = work_without_blocks(layers=layers, attention=0, kept=0)
        return Estimate({"training": items}, on_gpu=True, work=work)

    return estimate


def constant_seconds() -> float:
    """Return the time of a batch that computes nothing."""
    config = TrainConfig(device="cuda", precision="bf16")
    plan = Plan(config, linear(0)(config), chosen={})
    return step_seconds(plan, Budget(memory=0, host=0, rates=LINEAR))


@pytest.mark.parametrize(
    ("gib", "ratio", "samples", "effective", "expected"),
    [
        # Memory holds 20 samples, but batch sizes are powers of two.
        (20, 0.0, 1000, None, 16),
        # In units of the constant time, a batch of `n` samples takes `1 + n r`, where `r` is
        # `ratio`. From `n` to `2 n` samples, the time of a sample falls from `1/n + r` to
        # `1/(2n) + r`, that is, by the fraction `1 / (2 + 2 n r)`. This is 3 % for `n r = 15.7`;
        # for less than 3 %, the batch stays at `n`.
        (1000, 1.0, 1000, None, 16),
        (1000, 4.0, 1000, None, 4),
        (1000, 20.0, 1000, None, 1),
        # The data set has less than 16 samples.
        (1000, 1.0, 15, None, 8),
        # The batch divides the effective batch.
        (1000, 1.0, 1000, 12, 4),
        (3, 0.0, 1000, 12, 2),
    ],
)
def test_a_batch_of_auto_is_the_largest_that_is_worth_its_memory(
    gib: int, ratio: float, samples: int, effective: int | None, expected: int
) -> None:
    per_sample = ratio * constant_seconds()
    given: dict[str, Any] = {"gradient_checkpointing": "none", "optimizer_states": "device"}
    if effective is not None:
        # `make_plan` expects the accumulation of batches of one sample, and divides it.
        given |= {"effective_batch": effective, "gradient_accumulation": effective}
    config = TrainConfig(device="cuda", precision="bf16", batch_size="auto", **given)
    limits = Budget(memory=gib * GIB + RUNTIME_BYTES, host=GIB, rates=LINEAR)
    groups = families.find("digits").groups
    found = make_plan(config, groups, limits, linear(per_sample), samples)
    assert found.config.batch_size == expected
    assert found.config.gradient_accumulation == (effective // expected if effective else 1)
    # On the CPU, the batch size is 1.
    on_cpu = config.with_(device="cpu", optimizer_states="auto")
    assert make_plan(on_cpu, groups, limits, linear(0), samples).config.batch_size == 1
