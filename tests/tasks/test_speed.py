"""Predicted times of steps are close to measured ones, and more work lengthens a prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.tasks.speed import GPUS, Work, rates_of, seconds, work_of
from trainable_candle.train import TrainConfig

from .measured_runs import (
    ALL_FLUX,
    ATTENTION,
    FLUX,
    FULL,
    JOINT,
    OFFLOAD,
    ROWS,
    RUNS,
    SD3,
    SDXL,
    SELECTIVE,
    Z_IMAGE,
    Run,
    facts_of,
)  # fmt: skip

BF16_BYTES = 2
# Model, targets, sizes of the input, settings, and the measured milliseconds of a step on one H200
# in bf16 at rank 16. docs/benchmarks.md has the commands and dates of the measurements.
# ATTENTION and JOINT are the layers with adapters: those of attention, and in JOINT also those of
# attention for text tokens. FLUX, SDXL, SD3 and Z_IMAGE are the sizes of latents and texts for
# 1024 x 1024 px, and ROWS are texts of 2048 tokens. FULL, SELECTIVE and OFFLOAD are kinds of
# checkpointing; ALL_FLUX streams all blocks of Flux and its modulation, with full checkpointing.
MEASURED = [
    ("SDXL", ATTENTION, SDXL, {}, 41.0),
    ("SDXL", ATTENTION, SDXL, SELECTIVE, 43.4),
    ("SDXL", ATTENTION, SDXL, FULL, 55.6),
    ("SDXL", ATTENTION, SDXL, {"batch_size": 4}, 127.9),
    ("SDXL", ATTENTION, SDXL, FULL | {"base_precision": "nf4"}, 63.9),
    ("Flux.1-dev", JOINT, FLUX, {}, 307.5),
    ("Flux.1-dev", JOINT, FLUX, SELECTIVE, 313.9),
    ("Flux.1-dev", JOINT, FLUX, FULL, 401.2),
    ("Flux.1-dev", JOINT, FLUX, OFFLOAD, 403.3),
    ("Flux.1-dev", JOINT, FLUX, FULL | {"base_precision": "nf4"}, 425.6),
    ("Flux.1-dev", JOINT, FLUX, FULL | {"base_precision": "int8"}, 423.3),
    ("Flux.1-dev", JOINT, FLUX, ALL_FLUX | {"base_precision": "int8"}, 494.0),
    ("Flux.1-dev", JOINT, FLUX, ALL_FLUX, 740.0),
    ("SD3.5-medium", JOINT, SD3, {}, 68.0),
    ("SD3.5-medium", JOINT, SD3, FULL, 90.3),
    ("SD3.5-large", JOINT, SD3, FULL, 205.6),
    ("Z-Image", JOINT, Z_IMAGE, {}, 224.5),
    ("Z-Image", JOINT, Z_IMAGE, FULL, 320.9),
    ("FLUX.2-klein-4B", JOINT, FLUX, {}, 145.8),
    ("FLUX.2-klein-4B", JOINT, FLUX, SELECTIVE, 148.0),
    ("FLUX.2-klein-4B", JOINT, FLUX, FULL, 193.0),
    ("Qwen2-1.5B", ["all-linear"], ROWS, {"batch_size": 4}, 112.8),
    ("Qwen2-1.5B", ["all-linear"], ROWS, FULL | {"batch_size": 4}, 142.7),
    ("Llama-3-8B", ["all-linear"], ROWS, FULL | {"batch_size": 2}, 299.7),
    ("Llama-3-8B", ["all-linear"], ROWS, FULL | {"batch_size": 2, "base_precision": "nf4"}, 314.5),
]


def work(
    folder: Path, model: str, targets: list[str], sizes: dict[str, int], changes: dict[str, Any]
) -> Work:
    """Return the work of a step with adapters on `targets` and the settings `changes`."""
    config = TrainConfig(device="cuda", precision="bf16", **changes)
    return work_of(
        facts_of(folder, model), tc.LoraConfig(target_modules=targets), config, BF16_BYTES, **sizes
    )


@pytest.mark.parametrize(("model", "targets", "sizes", "changes", "measured"), MEASURED, ids=str)
def test_steps_on_an_h200_are_predicted_within_15_percent(
    tmp_path: Path,
    model: str,
    targets: list[str],
    sizes: dict[str, int],
    changes: dict[str, Any],
    measured: float,
) -> None:
    predicted = work(tmp_path, model, targets, sizes, changes)
    assert 1e3 * seconds(predicted, GPUS["H200"]) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("run", [run for run in RUNS if run.step is not None], ids=str)
def test_steps_of_runs_on_an_h100_are_predicted_within_15_percent(tmp_path: Path, run: Run) -> None:
    facts = facts_of(tmp_path, run.model)
    predicted = work_of(facts, run.adapter(), run.config(), BF16_BYTES, **run.sizes)
    assert 1e3 * seconds(predicted, GPUS["H100"]) == pytest.approx(run.step, rel=0.15)


@pytest.mark.parametrize(
    ("model", "sizes", "layers", "attention"),
    [
        # Operations for one image of 1024 x 1024 px, as in benches/gpu_transformers.py and
        # benches/gpu_sdxl.py: those of linear layers and convolutions, and those of attention.
        ("Flux.1-dev", FLUX, 59.5e12, 14.9e12),
        ("SDXL", SDXL, 5.98e12, 0.78e12),
        # Linear layers: two operations for each weight and token, without the embedding, which is
        # looked up. Attention: in each of 32 layers, four operations for each of 4096 features and
        # each pair of tokens; a token attends to half of the 2048 tokens on average.
        ("Llama-3-8B", ROWS, 2 * 2048 * (8030261248 - 128256 * 4096), 32 * 4 * 2048 * 1024 * 4096),
    ],
    ids=["Flux.1-dev", "SDXL", "Llama-3-8B"],
)
def test_operations_of_a_forward_pass_are_counted(
    tmp_path: Path, model: str, sizes: dict[str, int], layers: float, attention: float
) -> None:
    assert facts_of(tmp_path, model).forward_flops(**sizes) == (
        pytest.approx(layers, rel=0.005),
        pytest.approx(attention, rel=0.01),
    )


def test_more_work_makes_a_step_longer(tmp_path: Path) -> None:
    plain = work(tmp_path, "Flux.1-dev", JOINT, FLUX, {})
    longer = [
        replace(plain, recomputed=0.5),  # the share of the forward pass that is repeated
        replace(plain, decoded=1e10),  # the number of quantized weights
        replace(plain, streamed=2e10),  # bytes of the streamed weights of blocks
        replace(plain, modulation=2e10),  # bytes of the streamed modulation weights
        replace(plain, kept=2 * plain.kept),  # bytes kept for the backward pass
    ]
    for rates in GPUS.values():
        assert all(seconds(more, rates) > seconds(plain, rates) for more in longer)
    # If the copies take longer than the computation, they determine the time of a step.
    # Here 1e12 bytes are copied twice (for the forward and for the backward pass), at the
    # 25e9 bytes/s between this GPU and the host.
    copying = seconds(replace(plain, streamed=1e12), GPUS["RTX 4090"])
    assert copying == pytest.approx(2e12 / 25e9, rel=0.01)


def test_gpus_are_found_by_the_names_that_the_driver_gives() -> None:
    assert rates_of("NVIDIA GeForce RTX 4060 Ti") is GPUS["RTX 4060 Ti"]
    assert rates_of("NVIDIA H200") is GPUS["H200"]
    assert rates_of("Simulated GPU") is None
