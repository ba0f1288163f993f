"""Test the settings that a plan chooses for the available memory."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings.machine import CHECKPOINTING, FORMATS, SAME, STORED
from trainable_candle.tasks.budget import Budget, Plan, find_budget, make_plan, step_seconds
from trainable_candle.tasks.estimate import RUNTIME_BYTES, Estimate, Item
from trainable_candle.tasks.speed import GPUS
from trainable_candle.train import TrainConfig

from .full_size import MODELS, write_image, write_model
from .works import work_without_blocks

GIB = 2**30
CARDS = (6, 8, 12, 16, 24, 48)
"""Sizes of GPU memory, in GiB."""
PLENTY = {"gradient_checkpointing": "none", "base_precision": SAME}
"""Settings with which a run trains if memory suffices, so that its plan chooses nothing."""


class Model:
    """A full-size model on a GPU; its folder has configurations, but no weights."""

    def __init__(self, folder: Path, name: str) -> None:
        self.family = families.find(MODELS[name][0])
        self.weights = write_model(folder / "weights", name)
        self.dataset = write_image(folder / "images")

    def config(self, **changes: Any) -> TrainConfig:
        values: dict[str, Any] = {"device": "cuda", "precision": "bf16", "learning_rate": 1e-4}
        if self.family.name != "causal-lm":
            values |= {"resolution": 1024, "alpha": 16.0}
        return TrainConfig(**{**values, "dataset": str(self.dataset), **changes})

    def estimate(self, config: TrainConfig, limit: float) -> Callable[[TrainConfig], Estimate]:
        """Return a function that estimates runs in `limit` bytes.

        Their settings may differ from `config` in those that a plan chooses.
        """
        family: Any = self.family(self.weights, "bf16", "cuda", config)
        if self.family.name == "causal-lm":
            tokens = 2048
            return lambda other: family.estimate(other, tokens)
        task = family.task()
        return partial(task.estimate, data=task.read(lambda _: None), limit=limit)

    def plan(self, budget: Budget, samples: int = 1000, **changes: Any) -> Plan:
        """Return the plan for `config(**changes)` and a data set of `samples` images or texts."""
        config = self.config(**changes)
        estimate = self.estimate(config, budget.memory)
        return make_plan(config, self.family.groups, budget, estimate, samples)


@pytest.fixture(scope="module", params=["Flux.1-dev", "SDXL", "Llama-3-8B"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("budget"), request.param)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("budget"), "Flux.1-dev")


def budget(gib: float, gpu: str = "H200", host: float = 64 * GIB) -> Budget:
    """Return a budget of `gib` GiB of GPU memory and `host` bytes of host memory."""
    return Budget(gib * GIB, host, GPUS[gpu])


@pytest.mark.parametrize("gpu", ["RTX 3060", "RTX 4090", "H200"])
def test_a_plan_fits_and_a_plan_for_more_memory_is_hardly_slower(model: Model, gpu: str) -> None:
    times = []
    for card in CARDS:
        plan = model.plan(budget(card, gpu))
        assert plan.estimate.peak <= card * GIB
        times.append(step_seconds(plan, budget(card, gpu)))
        assert all(getattr(plan.config, name) == value for name, value in plan.chosen.items())
    # With more memory, a plan may leave the base unquantized. Its step is then slightly longer than
    # the step with a quantized base in less memory.
    assert all(after <= 1.25 * before for before, after in pairwise(times))
    assert times[-1] < times[0]


def test_nothing_is_chosen_where_memory_is_plenty(model: Model) -> None:
    plan = model.plan(budget(80))
    assert plan.chosen == {}
    assert plan.lines(budget(80)) == []
    assert {name: getattr(plan.config, name) for name in PLENTY} == PLENTY
    assert (plan.config.stream_blocks, plan.config.stream_modulation) == (None, None)


def test_no_other_settings_that_fit_with_the_same_base_are_faster(flux: Model) -> None:
    limits = budget(16, "RTX 4090")
    found = flux.plan(limits)
    estimate = flux.estimate(flux.config(), limits.memory)
    # Stream no block or all 57.
    for policy, base, blocks in product(CHECKPOINTING, (SAME, *FORMATS), (0, 57)):
        by_hand = flux.config(
            gradient_checkpointing=policy,
            base_precision=base,
            stream_blocks=blocks,
            stream_modulation=blocks > 0,
            text_encoder_precision=found.config.text_encoder_precision,
        )
        other = Plan(by_hand, estimate(by_hand), {})
        if other.estimate.peak <= limits.memory and base == found.config.base_precision:
            assert step_seconds(found, limits) <= step_seconds(other, limits)


@pytest.mark.parametrize("stored", ["fp8", "nf4"])
def test_a_quantized_file_keeps_its_format(flux: Model, stored: str) -> None:
    """The codes of the file represent its values, so keeping them costs no accuracy."""
    limits = budget(12)
    estimate = flux.estimate(flux.config(), limits.memory)

    def estimate_of_file(config: TrainConfig) -> Estimate:
        found = estimate(config)
        assert found.work is not None
        return replace(found, work=replace(found.work, stored_format=stored))

    groups = flux.family.groups
    of_bf16 = make_plan(flux.config(), groups, limits, estimate)
    of_codes = make_plan(flux.config(), groups, limits, estimate_of_file)
    assert (of_bf16.config.base_format, of_codes.config.base_format) == ("int8", stored)
    assert step_seconds(of_codes, limits) <= step_seconds(of_bf16, limits)
    # Where memory suffices, the codes are dequantized once, not in each step.
    assert make_plan(flux.config(), groups, budget(80), estimate_of_file).chosen == {}


def test_text_encoders_keep_the_formats_of_their_files(flux: Model) -> None:
    """A plan that needs smaller text encoders prefers the formats of their files."""
    limits = budget(8)
    estimate = flux.estimate(flux.config(), limits.memory)

    def estimate_of_files(config: TrainConfig) -> Estimate:
        # The files hold fp8.
        if config.text_encoder_precision == STORED:
            config = config.with_(text_encoder_precision="fp8")
        found = estimate(config)
        assert found.work is not None
        return replace(found, work=replace(found.work, texts_have_format=True))

    groups = flux.family.groups
    of_bf16 = make_plan(flux.config(), groups, limits, estimate)
    of_codes = make_plan(flux.config(), groups, limits, estimate_of_files)
    chosen = [plan.config.text_encoder_precision for plan in (of_bf16, of_codes)]
    assert chosen == ["int8", STORED]
    # Where memory suffices, the codes are dequantized once.
    assert make_plan(flux.config(), groups, budget(80), estimate_of_files).chosen == {}


def test_a_plan_keeps_given_settings_and_its_error_names_those_to_change(flux: Model) -> None:
    given = {
        "gradient_checkpointing": "selective",
        "base_precision": "fp8",
        "stream_modulation": False,
    }
    plan = flux.plan(budget(16), **given)
    assert {name: getattr(plan.config, name) for name in given} == given
    assert not plan.chosen.keys() & given.keys()
    message = "with --gradient-checkpointing full --base-precision nf4 --stream-modulation the run"
    # With these three changes the run fits, so the error does not name `stream_blocks`.
    with pytest.raises(OutOfMemoryError, match=message):
        flux.plan(budget(8), **given, stream_blocks=0)


def test_what_is_streamed_must_fit_into_host_memory(flux: Model) -> None:
    limits = budget(12, "RTX 4090")
    assert flux.plan(limits).config.streaming["stream_blocks"] > 0
    little_host = Budget(limits.memory, 1 * GIB, limits.rates)
    resident = flux.plan(little_host)
    assert resident.config.streaming == {"stream_blocks": 0, "stream_modulation": False}
    assert step_seconds(resident, little_host) >= step_seconds(flux.plan(limits), limits)


def test_too_little_host_memory_is_an_error(flux: Model) -> None:
    limits = budget(6)
    assert flux.plan(limits).estimate.host > 0
    message = (
        r"memory of the host: .* where 512\.0 MiB are free; .* a smaller --resolution or another"
    )
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        flux.plan(Budget(limits.memory, GIB // 2, limits.rates))
    assert "--sequence-length" not in str(caught.value)


def test_the_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight processes, two on each machine.
    group: Any = SimpleNamespace(size=8, local_size=2, exchange=lambda message: [message] * 8)
    monkeypatch.setattr(tc.memory, "available_bytes", lambda: 16 * GIB)
    found = find_budget(group, TrainConfig(device="cpu"))
    # On the CPU, `memory` is a share of the host's memory, too.
    assert (found.memory, found.host) == (8 * GIB, 8 * GIB)
    # Two processes on the machine share one copy of the streamed weights.
    assert (found.processes, found.sharing) == (2, 2)
    # The setting `vram` takes precedence over the memory that is available.
    given = find_budget(group, TrainConfig(device="cpu", vram=3.0))
    assert given.memory == 3 * GIB


def test_streamed_weights_that_processes_share_count_once_on_their_machine(flux: Model) -> None:
    limits = budget(12, "RTX 4090")
    # The policy "offload" would also keep the inputs of blocks in host memory, and each process has
    # inputs of its own.
    given = {"gradient_checkpointing": "full"}
    plan = flux.plan(limits, **given)
    need = plan.estimate.host
    assert need > 0
    # `host` is the memory of one process: a quarter of what the machine needs.
    enough = Budget(limits.memory, need / 4 + 1, limits.rates, processes=4, sharing=4)
    assert enough.host_need(plan.estimate) == need / 4
    assert flux.plan(enough, **given).config == plan.config
    # If each process has its own copy of the streamed weights, the plan must choose other settings.
    unshared = Budget(limits.memory, need / 4 + 1, limits.rates, processes=4)
    assert unshared.host_need(plan.estimate) == need
    assert flux.plan(unshared, **given).config != plan.config


def test_the_host_memory_in_messages_is_that_of_the_machine(flux: Model) -> None:
    def need(sharing: int) -> float:
        """Return the GiB of host memory that the error names for two processes on a machine."""
        limits = Budget(6 * GIB, GIB / 4, processes=2, sharing=sharing)
        # Each process may use 256 MiB.
        message = r"on the GPU and ([\d.]+) GiB in host memory, where 512\.0 MiB are free"
        with pytest.raises(OutOfMemoryError, match=message) as caught:
            flux.plan(limits, gradient_checkpointing="full", optimizer_states="device")
        (gib,) = re.findall(message, str(caught.value))
        return float(gib)

    # Two processes that share no copy hold two copies of the streamed weights.
    assert need(sharing=1) == pytest.approx(2 * need(sharing=2), abs=0.02)


def test_slices_for_peers_take_memory_of_each_gpu(flux: Model) -> None:
    given = {"gradient_checkpointing": "full", "base_precision": SAME, "stream_blocks": 57}
    given |= {"stream_modulation": True, "stream_from": "peers"}
    # Without peers, the weights come from the host.
    from_host = flux.plan(budget(80), **given)
    work = from_host.estimate.work
    assert work is not None
    streamed = work.streamed + work.modulation
    for count in (2, 4):
        limits = Budget(
            80 * GIB, 64 * GIB, GPUS["H200"], processes=count, sharing=count, peers="nvlink"
        )
        plan = flux.plan(limits, **given)
        assert plan.estimate.phases["training"][-1].bytes == math.ceil(streamed / count)
        # Captions and images are encoded before the model is loaded, so no slice takes memory then.
        for phase in ("encoding captions", "encoding images"):
            assert plan.estimate.phases[phase] == from_host.estimate.phases[phase]
        assert plan.estimate.phases["training"][:-1] == from_host.estimate.phases["training"]
        # The table pads the item's name with spaces.
        assert f"slice of streamed weights{'':<6}" in " ".join(plan.estimate.table())
        # A process holds its slice in host memory only until the model is loaded.
        assert limits.host_need(plan.estimate) == pytest.approx(streamed / count)
        assert step_seconds(plan, limits) < step_seconds(from_host, budget(80))
        # Copies from other GPUs without NVLink cross the same bus as copies from the host.
        by_bus = replace(limits, peers="bus")
        assert step_seconds(plan, by_bus) == step_seconds(from_host, budget(80))


def test_a_plan_streams_weights_that_do_not_fit_from_peers(flux: Model) -> None:
    given = {"gradient_checkpointing": "full", "base_precision": SAME, "stream_from": "peers"}
    limits = Budget(24 * GIB, 64 * GIB, GPUS["H200"], processes=4, sharing=4, peers="nvlink")
    plan = flux.plan(limits, **given)
    assert plan.config.streams
    assert plan.estimate.peak <= limits.memory
    first_line = plan.lines(limits)[0]
    assert re.search(r"--stream-modulation from 4 GPUs by NVLink \(about ", first_line)
    # With two GPUs, each GPU holds half of the streamed weights; 9 GiB are too little for that.
    with pytest.raises(OutOfMemoryError, match="GPU memory: the run needs about"):
        flux.plan(replace(limits, memory=9 * GIB, processes=2, sharing=2), **given)


def test_processes_share_no_host_memory_besides_streamed_weights(flux: Model) -> None:
    # Of these limits, `host_need` uses only `sharing`. The added GiB is for the original weights
    # that LoftQ needs.
    limits = Budget(1.0, 1.0, processes=2, sharing=2)
    streamed = flux.plan(budget(12), gradient_checkpointing="full").estimate
    assert limits.host_need(replace(streamed, host=streamed.host + GIB)) == streamed.host / 2 + GIB


def test_a_plan_says_what_it_chose_and_what_more_memory_would_bring(flux: Model) -> None:
    limits = budget(12)
    plan = flux.plan(limits)
    choice, faster, copies = plan.lines(limits)
    assert choice.startswith("plan: --gradient-checkpointing offload --checkpoint-blocks ")
    assert choice.endswith(" s a step) fits in 12.00 GiB")
    assert faster.startswith("plan: faster with more memory: ")
    # `nearest` is the faster plan that needs the least memory.
    assert plan.nearest is not None
    assert plan.nearest.estimate.peak > 12 * GIB
    assert step_seconds(plan.nearest, limits) < step_seconds(plan, limits)
    assert copies == "plan: " + line_of_copies(plan, limits)
    # For an unknown GPU, the plan reports neither times nor copies.
    unknown = Budget(12 * GIB, 64 * GIB)
    assert len(flux.plan(unknown).lines(unknown)) == 2
    assert "s a step" not in " ".join(flux.plan(unknown).lines(unknown))


def line_of_copies(plan: Plan, limits: Budget) -> str:
    """Return the line that compares the time of copies with that of computation, without "plan: ".

    The copies take their bytes divided by the rate of the link. Blocks are copied for the forward
    pass and again for the backward pass, modulation weights once, and offloaded inputs to the host
    and back. The computation takes as long as a step of the same work that copies nothing.
    """
    work = plan.estimate.work
    assert work is not None
    assert limits.rates is not None
    copied = 2 * work.streamed + work.modulation + 2 * work.offloaded
    copying = copied / limits.rates.link
    without_copies = replace(work, streamed=0, modulation=0, offloaded=0)
    computing = step_seconds(
        replace(plan, estimate=Estimate({"training": []}, on_gpu=True, work=without_copies)),
        limits,
    )
    comparison = "shorter" if copying <= computing else "longer"
    return (
        f"copies to and from the GPU take {copying:.2g} s, which is {comparison} than the "
        f"{computing:.2g} s of computation beside them"
    )


@pytest.mark.parametrize(("gpu", "comparison"), [("RTX 3060", "shorter"), ("H200", "longer")])
def test_copies_of_streamed_blocks_are_compared_with_the_computation(
    flux: Model, gpu: str, comparison: str
) -> None:
    """On a fast GPU, copies of all blocks take longer than the computation."""
    given = {"gradient_checkpointing": "full", "base_precision": SAME, "stream_blocks": 57}
    limits = budget(80, gpu)
    plan = flux.plan(limits, **given, stream_modulation=True)
    assert plan.chosen == {}
    (line,) = plan.lines(limits)
    assert line == "plan: " + line_of_copies(plan, limits)
    assert f"which is {comparison} than" in line


def test_a_plan_leaves_a_margin_and_a_second_plan_takes_less(flux: Model) -> None:
    limits = Budget(12 * GIB, 64 * GIB, GPUS["H200"], margin=0.05)
    first = flux.plan(limits)
    assert first.estimate.peak <= 0.95 * 12 * GIB
    # `below` gives the budget of a second attempt, after the first plan ran out of memory: 0.9 of
    # what the first plan takes besides the runtime.
    second = flux.plan(limits.below(first.estimate.peak))
    assert second.estimate.peak - RUNTIME_BYTES <= 0.9 * (first.estimate.peak - RUNTIME_BYTES)


def test_a_batch_of_auto_is_doubled_while_samples_get_faster(model: Model) -> None:
    for card in (8, 16, 80):
        limits = budget(card, "RTX 4090")
        found = model.plan(limits, batch_size="auto")
        count = found.config.batch_size
        assert found.chosen["batch_size"] == count
        assert found.estimate.peak <= limits.memory
        for other in (count // 2, 2 * count):
            if other < 1:
                continue
            try:
                by_hand = model.plan(limits, batch_size=other)
            except OutOfMemoryError:
                continue
            if by_hand.config.base_precision == found.config.base_precision:
                # A gain of less than about 4 percent is not worth a larger batch.
                seconds_per_sample = step_seconds(by_hand, limits) / other
                assert seconds_per_sample >= 0.96 * step_seconds(found, limits) / count


# The batch size is a power of two, so `most` is the largest power of two that divides `effective`.
@pytest.mark.parametrize(("effective", "most"), [(16, 16), (12, 4), (3, 1)])
def test_a_batch_of_auto_divides_the_effective_batch(
    tmp_path: Path, effective: int, most: int
) -> None:
    limits = budget(141)
    # `gradient_accumulation` is that of batches of one sample in a single process.
    plan = Model(tmp_path, "SDXL").plan(
        limits, batch_size="auto", effective_batch=effective, gradient_accumulation=effective
    )
    count = plan.config.batch_size
    assert count * plan.config.gradient_accumulation == effective
    assert 1 <= count <= most
    assert (count > 1) == (most > 1)
    names = list(plan.chosen)[:2]
    assert names == ["batch_size", "gradient_accumulation"]
    flags = f"--batch-size {count} --gradient-accumulation {effective // count}"
    assert flags in plan.lines(limits)[0]


def test_a_batch_of_auto_is_no_larger_than_the_data_set(flux: Model) -> None:
    limits = budget(141)
    assert flux.plan(limits, samples=3, batch_size="auto").config.batch_size <= 2
    assert flux.plan(limits, samples=1, batch_size="auto").config.batch_size == 1


def needs(activations: int) -> Callable[[TrainConfig], Estimate]:
    """Return a function that estimates the memory of a run with given settings.

    A sample takes `activations` bytes of activations, or a quarter of that with full checkpointing.
    The adapter takes 1 MiB for each unit of its rank.
    """

    @cache
    def estimate(policy: str, batch_size: int, rank: int) -> Estimate:
        divisor = 4 if policy == "full" else 1
        items = [
            Item("unet", "activations", activations * batch_size // divisor),
            Item("unet", "adapter", rank * 2**20),
        ]
        return Estimate({"training": items})

    return lambda config: estimate(config.checkpointing, config.batch_size, config.rank)


def plan_of(limit: float, activations: int, **changes: Any) -> Plan:
    """Return the plan for `limit` bytes of a CPU and a run that needs what `needs` describes."""
    config = TrainConfig(device="cpu", precision="f32", **{"rank": 1, "batch_size": 4, **changes})
    groups = families.find("digits").groups
    return make_plan(config, groups, Budget(limit, 0), needs(activations))


def test_a_plan_for_the_cpu_chooses_checkpointing() -> None:
    assert plan_of(9 * GIB, 2 * GIB).chosen == {}
    assert plan_of(3 * GIB, 2 * GIB).chosen == {"gradient_checkpointing": "full"}


# With full checkpointing and a batch of 1, the activations take 512 MiB (2 GiB without it), the
# adapter 1 MiB for each unit of its rank, and the runtime 200 MiB (`RUNTIME_BYTES`). The first
# lower rank that an error proposes is 128.
@pytest.mark.parametrize(
    ("limit", "changes", "message"),
    [
        (GIB, {}, r"with --batch-size 1 the run would need 713\.0 MiB"),
        (GIB, {"rank": 1000}, r"with --rank 128 --batch-size 1 the run would need 840\.0 MiB"),
        (2**20, {}, r"with the smallest settings the run would need 713\.0 MiB"),
        (
            3 * GIB,
            {"gradient_checkpointing": "none"},
            r"with --batch-size 1 the run would need 2\.20 GiB",
        ),
    ],
    ids=str,
)
def test_the_error_of_a_run_that_cannot_fit_names_settings_with_lower_needs(
    limit: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"the run needs about \d+\.\d\d GiB") as caught:
        plan_of(limit, 2 * GIB, **changes)
    caught.match(message)


def test_a_weight_is_not_rounded_to_a_second_format(flux: Model) -> None:
    resident = {"stream_blocks": 0, "stream_modulation": False}
    # `qat` (quantization-aware training) rounds the weights of the base plus the adapter's product
    # to the grid, the numbers of a format. A plan must not quantize the base to another format.
    # A base in the format of the grid fits. There is no base in int4, and one in bf16 does not fit.
    for grid in ("int8", "nf4"):
        found = flux.plan(budget(16), qat=grid, **resident)
        assert found.config.base_precision == grid
    with pytest.raises(OutOfMemoryError):
        flux.plan(budget(16), qat="int4", **resident)


def test_models_without_blocks_stream_nothing() -> None:
    work = work_without_blocks(layers=1e9, attention=1e8, kept=1e6)
    tried: list[TrainConfig] = []

    def estimate(config: TrainConfig) -> Estimate:
        tried.append(config)
        return Estimate({"training": [Item("model", "weights", GIB)]}, on_gpu=True, work=work)

    config = TrainConfig(device="cuda", precision="bf16")
    with pytest.raises(OutOfMemoryError):
        make_plan(config, families.find("digits").groups, Budget(GIB // 2, GIB), estimate)
    assert {config.stream_blocks for config in tried} == {None}
    assert not any(config.stream_modulation for config in tried)
