"""Predicted times of steps are close to measured ones, and each term lengthens a prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.tasks.speed import GPUS, Work, rates_of, seconds, work_of
from trainable_candle.train import TrainConfig
from trainable_candle.train.adapters import adapter_config

from .full_size import write_model

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
FLUX = {"height": 128, "width": 128, "tokens": 512}
SDXL = {"height": 128, "width": 128, "tokens": 77}
SD3 = {"height": 128, "width": 128, "tokens": 333}
Z_IMAGE = {"height": 128, "width": 128, "tokens": 128}
ROWS = {"tokens": 2048}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
OFFLOAD: dict[str, Any] = {"gradient_checkpointing": "offload"}
ASIDE: dict[str, Any] = {"stream_modulation": True}
ALL_FLUX: dict[str, Any] = FULL | {"stream_blocks": 57, "stream_modulation": True}

# Model, targets, sizes of the input, settings, and the measured milliseconds of a step on one H200
# in bf16 at rank 16. docs/benchmarks.md has the commands and dates of the measurements.
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
# Model, family, sizes of the input, settings, and the measured milliseconds of a step on one H100
# with the family's default adapter of rank 16. docs/memory.md has the command and the date.
RUNS = [
    ("SDXL", "sdxl", SDXL, FULL | {"stream_blocks": 17}, 73),
    ("SDXL", "sdxl", SDXL, SELECTIVE | {"stream_blocks": 52}, 131),
    ("SDXL", "sdxl", SDXL, SELECTIVE, 52),
    ("SD3.5-medium", "sd3", SD3, SELECTIVE | ASIDE | {"stream_blocks": 24}, 139),
    ("SD3.5-medium", "sd3", SD3, SELECTIVE | ASIDE | {"stream_blocks": 6}, 89),
    ("Flux.1-dev", "flux", FLUX, OFFLOAD | ASIDE | {"stream_blocks": 49}, 785),
    ("Flux.1-dev", "flux", FLUX, OFFLOAD | ASIDE | {"stream_blocks": 42}, 689),
    ("Flux.1-dev", "flux", FLUX, FULL | ASIDE | {"stream_blocks": 35}, 614),
    ("Flux.1-dev", "flux", FLUX, FULL | ASIDE | {"stream_blocks": 21}, 541),
    ("FLUX.2-klein-4B", "flux2", FLUX, OFFLOAD | {"stream_blocks": 9}, 225),
    ("FLUX.2-klein-4B", "flux2", FLUX, SELECTIVE | {"stream_blocks": 21}, 241),
    ("FLUX.2-klein-4B", "flux2", FLUX, {}, 154),
    ("Qwen2-1.5B", "causal-lm", ROWS, {"stream_blocks": 14}, 52),
    ("Qwen2-1.5B", "causal-lm", ROWS, {}, 32),
    ("Llama-3-8B", "causal-lm", ROWS, FULL | {"stream_blocks": 32}, 512),
    ("Llama-3-8B", "causal-lm", ROWS, OFFLOAD | {"stream_blocks": 24}, 429),
    ("Z-Image", "zimage", Z_IMAGE, OFFLOAD | {"stream_blocks": 21}, 390),
    ("Z-Image", "zimage", Z_IMAGE, FULL | {"stream_blocks": 12}, 340),
    ("Z-Image", "zimage", Z_IMAGE, SELECTIVE | {"stream_blocks": 8}, 254),
]


def facts_of(folder: Path, model: str) -> tc.PartFacts:
    """The facts of the part that is trained: the denoiser or the language model."""
    parts = tc.inspect(write_model(folder, model)).parts
    (found,) = (parts[name] for name in ("unet", "transformer", "") if name in parts)
    return found


def work(
    folder: Path, model: str, targets: list[str], sizes: dict[str, int], changes: dict[str, Any]
) -> Work:
    config = TrainConfig(device="cuda", precision="bf16", **changes)
    return work_of(
        facts_of(folder, model), tc.LoraConfig(target_modules=targets), config, 2, **sizes
    )


@pytest.mark.parametrize(("model", "targets", "sizes", "changes", "measured"), MEASURED, ids=str)
def test_steps_are_predicted_within_15_percent(
    tmp_path: Path,
    model: str,
    targets: list[str],
    sizes: dict[str, int],
    changes: dict[str, Any],
    measured: float,
) -> None:
    found = work(tmp_path, model, targets, sizes, changes)
    assert 1e3 * seconds(found, GPUS["H200"]) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("model", "family", "sizes", "changes", "measured"), RUNS, ids=str)
def test_steps_of_runs_are_predicted_within_15_percent(
    tmp_path: Path,
    model: str,
    family: str,
    sizes: dict[str, int],
    changes: dict[str, Any],
    measured: float,
) -> None:
    config = TrainConfig(device="cuda", precision="bf16", rank=16, **changes)
    kind = families.find(family)
    adapter = adapter_config(config, kind.targets, kind.formats)
    found = work_of(facts_of(tmp_path, model), adapter, config, 2, **sizes)
    assert 1e3 * seconds(found, GPUS["H100"]) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("model", "sizes", "layers", "attention"),
    [
        # Operations of the linear layers and of attention, for images of 1024 x 1024 px.
        ("Flux.1-dev", FLUX, 59.5e12, 14.9e12),
        ("SDXL", SDXL, 5.98e12, 0.78e12),
        # Two operations for each weight and token, without the embedding, which is looked up.
        ("Llama-3-8B", ROWS, 2 * 2048 * (8030261248 - 128256 * 4096), 32 * 4 * 2048 * 1024 * 4096),
    ],
)
def test_operations_of_a_forward_pass(
    tmp_path: Path, model: str, sizes: dict[str, int], layers: float, attention: float
) -> None:
    assert facts_of(tmp_path, model).forward_flops(**sizes) == (
        pytest.approx(layers, rel=0.005),
        pytest.approx(attention, rel=0.01),
    )


def test_settings_that_make_a_step_longer(tmp_path: Path) -> None:
    plain = work(tmp_path, "Flux.1-dev", JOINT, FLUX, {})
    longer = [
        replace(plain, recomputes=True),
        replace(plain, decoded=1e10),
        replace(plain, streamed=2e10),
        replace(plain, modulation=2e10),
        replace(plain, kept=2 * plain.kept),
    ]
    for rates in GPUS.values():
        assert all(seconds(other, rates) > seconds(plain, rates) for other in longer)
    # If the copies take longer than the computation, they determine the time of a step.
    bound = seconds(replace(plain, streamed=1e12), GPUS["RTX 4090"])
    assert bound == pytest.approx(2e12 / 25e9, rel=0.01)


def test_gpus_are_known_by_the_driver_s_names() -> None:
    assert rates_of("NVIDIA GeForce RTX 4060 Ti") is GPUS["RTX 4060 Ti"]
    assert rates_of("NVIDIA H200") is GPUS["H200"]
    assert rates_of("Simulated GPU") is None
