"""Predicted peaks of GPU memory are close to measured ones, and count the largest gradient."""

from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.tasks.estimate import GIB, Estimate, trained_model
from trainable_candle.train import TrainConfig
from trainable_candle.train.adapters import adapter_config

from .test_speed import (
    ASIDE,
    FLUX,
    FULL,
    JOINT,
    OFFLOAD,
    ROWS,
    SD3,
    SDXL,
    SELECTIVE,
    Z_IMAGE,
    facts_of,
)

# Model, family, sizes of the input, settings, and the measured peak in GiB on one H100 in bf16 with
# the default adapter of rank 16. docs/memory.md has the command and the date.
MEASURED = [
    ("SDXL", "sdxl", SDXL, FULL | {"stream_blocks": 17}, 5.13),
    ("SDXL", "sdxl", SDXL, SELECTIVE | {"stream_blocks": 52}, 6.24),
    ("SDXL", "sdxl", SDXL, SELECTIVE, 9.21),
    ("SD3.5-medium", "sd3", SD3, SELECTIVE | ASIDE | {"stream_blocks": 24}, 5.30),
    ("SD3.5-medium", "sd3", SD3, SELECTIVE | ASIDE | {"stream_blocks": 6}, 7.30),
    ("Flux.1-dev", "flux", FLUX, OFFLOAD | ASIDE | {"stream_blocks": 49}, 5.30),
    ("Flux.1-dev", "flux", FLUX, OFFLOAD | ASIDE | {"stream_blocks": 42}, 7.30),
    ("Flux.1-dev", "flux", FLUX, OFFLOAD | ASIDE | {"stream_blocks": 28}, 11.29),
    ("Flux.1-dev", "flux", FLUX, FULL | ASIDE | {"stream_blocks": 35}, 10.88),
    ("Flux.1-dev", "flux", FLUX, FULL | ASIDE | {"stream_blocks": 21}, 14.65),
    ("Flux.1-dev", "flux", FLUX, SELECTIVE | ASIDE | {"stream_blocks": 42}, 20.94),
    ("FLUX.2-klein-4B", "flux2", FLUX, OFFLOAD | {"stream_blocks": 9}, 6.94),
    ("FLUX.2-klein-4B", "flux2", FLUX, SELECTIVE | {"stream_blocks": 21}, 10.80),
    ("FLUX.2-klein-4B", "flux2", FLUX, {}, 18.11),
    ("Qwen2-1.5B", "causal-lm", ROWS, {"stream_blocks": 14}, 5.00),
    ("Qwen2-1.5B", "causal-lm", ROWS, {}, 6.05),
    ("Llama-3-8B", "causal-lm", ROWS, FULL | {"stream_blocks": 32}, 4.30),
    ("Llama-3-8B", "causal-lm", ROWS, OFFLOAD | {"stream_blocks": 24}, 7.28),
    ("Llama-3-8B", "causal-lm", ROWS, {"stream_blocks": 28}, 11.16),
    ("Z-Image", "zimage", Z_IMAGE, OFFLOAD | {"stream_blocks": 21}, 6.81),
    ("Z-Image", "zimage", Z_IMAGE, FULL | {"stream_blocks": 12}, 10.52),
    ("Z-Image", "zimage", Z_IMAGE, SELECTIVE | {"stream_blocks": 8}, 22.33),
]


@pytest.mark.parametrize(("model", "family", "sizes", "changes", "measured"), MEASURED, ids=str)
def test_peaks_are_predicted_within_5_percent(
    tmp_path: Path,
    model: str,
    family: str,
    sizes: dict[str, int],
    changes: dict[str, Any],
    measured: float,
) -> None:
    config = TrainConfig(device="cuda", precision="bf16", rank=16, **changes)
    found = families.find(family)
    adapter = adapter_config(config, found.targets, found.formats)
    trained = trained_model("model", facts_of(tmp_path, model), adapter, config, **sizes)
    peak = Estimate({"training": trained.items}, on_gpu=True).peak
    assert peak / GIB == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("model", "targets", "sizes", "values"),
    [
        # In a block with one stream: queries, keys, values and the network's first layer.
        ("Flux.1-dev", JOINT, FLUX, (4096 + 512) * (3 * 3072 + 4 * 3072)),
        # The first layer of the network, GEGLU's two halves, at 64 x 64 tokens.
        ("SDXL", ["to_q"], SDXL, 4096 * 2 * 4 * 640),
        # SwiGLU's two layers.
        ("Llama-3-8B", ["q_proj"], ROWS, 2048 * 2 * 14336),
        # No gradient reaches a layer before the first adapter.
        ("Llama-3-8B", ["model.layers.31.mlp.down_proj"], ROWS, 2048 * 4096),
    ],
    ids=str,
)
def test_the_largest_gradient_is_that_of_layers_with_one_input(
    tmp_path: Path, model: str, targets: list[str], sizes: dict[str, int], values: int
) -> None:
    config = tc.LoraConfig(target_modules=targets)
    assert facts_of(tmp_path, model).widest_gradient(config, **sizes) == values
