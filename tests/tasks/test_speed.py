"""Predicted times of steps are close to measured ones, and each term lengthens a prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.tasks.speed import GPUS, Work, rates_of, seconds, work_of
from trainable_candle.train import TrainConfig

from .full_size import write_model

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
FLUX = {"height": 128, "width": 128, "tokens": 512}
SDXL = {"height": 128, "width": 128, "tokens": 77}
SD3 = {"height": 128, "width": 128, "tokens": 333}
Z_IMAGE = {"height": 128, "width": 128, "tokens": 128}
ROWS = {"tokens": 2048}
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
ALL_FLUX: dict[str, Any] = FULL | {"stream_blocks": 57, "stream_modulation": True}

# Model, targets, sizes of the input, settings, and the measured milliseconds of a step on one H200
# in bf16 at rank 16. docs/benchmarks.md has the commands and dates of the measurements.
MEASURED = [
    ("SDXL", ATTENTION, SDXL, {}, 44.5),
    ("SDXL", ATTENTION, SDXL, FULL, 60.4),
    ("SDXL", ATTENTION, SDXL, {"batch_size": 4}, 136.8),
    ("SDXL", ATTENTION, SDXL, FULL | {"base_precision": "nf4"}, 68.0),
    ("Flux.1-dev", JOINT, FLUX, {}, 318.0),
    ("Flux.1-dev", JOINT, FLUX, {"gradient_checkpointing": "selective"}, 320.0),
    ("Flux.1-dev", JOINT, FLUX, FULL, 409.0),
    ("Flux.1-dev", JOINT, FLUX, FULL | {"base_precision": "nf4"}, 489.0),
    (
        "Flux.1-dev",
        JOINT,
        FLUX,
        FULL | {"base_precision": "int8", "stream_modulation": True},
        430.0,
    ),
    ("Flux.1-dev", JOINT, FLUX, ALL_FLUX | {"base_precision": "int8"}, 494.0),
    ("Flux.1-dev", JOINT, FLUX, ALL_FLUX, 740.0),
    ("SD3.5-medium", JOINT, SD3, {}, 69.0),
    ("SD3.5-medium", JOINT, SD3, FULL, 92.0),
    ("SD3.5-large", JOINT, SD3, FULL, 208.0),
    ("Z-Image", JOINT, Z_IMAGE, {}, 228.0),
    ("Z-Image", JOINT, Z_IMAGE, FULL, 324.0),
    ("FLUX.2-klein-4B", JOINT, FLUX, {}, 147.0),
    ("FLUX.2-klein-4B", JOINT, FLUX, FULL, 206.0),
    ("Qwen2-1.5B", ["all-linear"], ROWS, {"batch_size": 4}, 126.8),
    ("Qwen2-1.5B", ["all-linear"], ROWS, FULL | {"batch_size": 4}, 165.2),
    ("Llama-3-8B", ["all-linear"], ROWS, FULL | {"batch_size": 2}, 333.0),
    ("Llama-3-8B", ["all-linear"], ROWS, FULL | {"batch_size": 2, "base_precision": "nf4"}, 347.0),
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
