"""Rules and numbers in docs/memory.md that no other test of plans covers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import _core, families
from trainable_candle.settings.machine import SAME
from trainable_candle.tasks.budget import PLANNED, Budget, Plan, find_budget, make_plan
from trainable_candle.tasks.choices import ladders
from trainable_candle.tasks.estimate import GIB, RUNTIME_BYTES, Estimate, Item, adapter_items
from trainable_candle.tasks.pinned import probed, with_ring
from trainable_candle.tasks.speed import GPUS, seconds
from trainable_candle.train import TrainConfig

from .measured_runs import facts_of
from .works import work_without_blocks

CARD = GPUS["RTX 4090"]
ON_GPU = TrainConfig(device="cuda", precision="bf16")


def test_modulation_is_streamed_before_blocks_and_no_plan_rounds_to_fp8() -> None:
    # The `Work` of a model with blocks, made from that of a model without blocks.
    work = replace(
        work_without_blocks(layers=1e12, attention=0, kept=0),
        blocks=57,
        has_modulation=True,
        can_be_quantized=True,
    )
    found = ladders(ON_GPU, PLANNED, work)
    for choice in (choice for ladder in found for choice in ladder):
        assert choice["stream_blocks"] is None or choice["stream_modulation"]
        assert choice["base_precision"] in {SAME, "int8", "nf4"}
    # Each ladder begins without streaming, and streams all blocks in the end.
    ends = [(ladder[0]["stream_modulation"], ladder[-1]["stream_blocks"]) for ladder in found]
    assert set(ends) == {(None, 57)}
    # Only of a model whose file is in fp8 may a plan use fp8: it keeps the codes of the file.
    of_fp8 = ladders(ON_GPU, PLANNED, replace(work, stored_format="fp8"))
    assert any(ladder[0]["base_precision"] == "fp8" for ladder in of_fp8)


@pytest.mark.parametrize(("slower", "place"), [(1.04, "device"), (1.06, "host")])
def test_states_are_in_host_memory_only_if_other_choices_are_5_percent_slower(
    slower: float, place: str
) -> None:
    """The other choice recomputes the blocks. Both need 10 GiB of GPU memory."""
    work = work_without_blocks(layers=60e12, attention=15e12, kept=4e9)
    not_recomputing, recomputing = (
        seconds(each, CARD) for each in (work, replace(work, recomputed=1.0))
    )
    # Choose the bytes of the states so that a step with states in host memory takes the time
    # `recomputing / slower`. The states cross the bus twice in a step.
    states = (recomputing / slower - not_recomputing) * CARD.link / 2
    assert states > 0

    def estimate(config: TrainConfig) -> Estimate:
        recomputed = config.gradient_checkpointing == "full"
        activations = 2 if recomputed else 4  # GiB, as the following numbers
        optimizer_states = 0 if config.states_on_host else 2
        others = 6
        held = activations + optimizer_states + others
        items = [Item("model", "", held * GIB - RUNTIME_BYTES)]
        on_host = states if config.states_on_host else 0
        done = replace(work, recomputed=float(recomputed), states=on_host)
        return Estimate({"training": items}, on_gpu=True, work=done, host=int(on_host))

    groups = families.find("digits").groups
    found = make_plan(ON_GPU, groups, Budget(10 * GIB, 64 * GIB, CARD), estimate)
    assert found.config.states_on_host == (place == "host")
    assert found.estimate.peak == 10 * GIB


def probe(monkeypatch: pytest.MonkeyPatch, needed: float) -> list[int]:
    """Return how many bytes a run asks the system to pin if its plan needs `needed` bytes."""
    asked: list[int] = []

    def pinnable(_device: str, wanted: int) -> int:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(_core, "cuda_pinnable_bytes", pinnable)
    work = replace(work_without_blocks(layers=1e9, attention=0, kept=0), states=needed)
    estimate = Estimate({"training": []}, on_gpu=True, work=work, host=int(needed))
    plan = Plan(ON_GPU, estimate, chosen={})
    group: Any = SimpleNamespace(exchange=lambda message: [message])
    probed(Budget(24 * GIB, 64 * GIB, CARD), plan, group, print)
    return asked


@pytest.mark.parametrize(
    ("needed", "asked"),
    [(GIB // 2 - 1, []), (GIB // 2, [GIB // 2]), (9 * GIB, [4 * GIB])],
)
def test_pinned_memory_is_probed_from_half_a_gib_on_and_up_to_four(
    monkeypatch: pytest.MonkeyPatch, needed: int, asked: list[int]
) -> None:
    assert probe(monkeypatch, needed) == asked


def test_weights_that_cannot_be_pinned_are_copied_at_10_gb_a_second_or_the_rate_of_the_bus() -> (
    None
):
    # The share of the streamed weights that go through the ring: all, because none can be pinned.
    share = 1.0
    assert with_ring(CARD, share).streams == pytest.approx(10e9)
    assert with_ring(replace(CARD, link=6e9), share).streams == pytest.approx(6e9)


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.95), ("cpu", 1.0)])
def test_a_plan_for_a_gpu_leaves_5_percent_free(
    monkeypatch: pytest.MonkeyPatch, device: str, share: float
) -> None:
    stats = {"free": 24 * GIB, "reserved": 0, "allocated": 0}
    monkeypatch.setattr(tc.cuda, "memory_stats", lambda _device: stats)
    monkeypatch.setattr(tc.cuda, "get_device_name", lambda _device: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(tc.memory, "available_bytes", lambda: 24 * GIB)
    group: Any = SimpleNamespace(size=1, local_size=1, exchange=lambda message: [message])
    found = find_budget(group, TrainConfig(device=device))
    assert found.planned == pytest.approx(share * 24 * GIB)
    assert found.rates == (CARD if device == "cuda" else None)


# The document's bytes for each parameter of an adapter: in all, and of the optimizer's states.
@pytest.mark.parametrize(
    ("optimizer", "rounding", "bytes_each", "of_states"),
    [
        ("adamw", False, 18, 8),
        ("adamw", True, 8, 4),
        ("adamw8bit", False, 12, 2),
        ("adamw8bit", True, 6, 2),
    ],
)
def test_parameters_of_an_adapter_take_the_bytes_of_the_document(
    tmp_path: Path, optimizer: str, rounding: bool, bytes_each: int, of_states: int
) -> None:
    config = ON_GPU.with_(optimizer=optimizer, stochastic_rounding=rounding)
    adapter = tc.LoraConfig(r=64, target_modules=["q_proj"], dtype="bf16" if rounding else "f32")
    facts = facts_of(tmp_path, "Llama-3-8B")
    layers = [facts.layers[name] for name in adapter.select(dict(facts.layers))]
    count = sum(64 * (rows + columns) for rows, columns in layers)
    items = {
        item.what: item.bytes for item in adapter_items("model", facts.layers, adapter, config)
    }
    # Quantized states also have a scale for each 256 elements.
    assert items["optimizer"] / count == pytest.approx(of_states, rel=0.02)
    assert sum(items.values()) / count == pytest.approx(bytes_each, rel=0.01)
