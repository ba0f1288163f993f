"""Test predicted peaks of GPU memory against measured ones, and the size of the widest gradient."""

from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle.tasks.estimate import GIB, Estimate, trained_model

from .measured_runs import FLUX, JOINT, ROWS, RUNS, SDXL, Run, facts_of


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_peaks_are_predicted_within_5_percent(tmp_path: Path, run: Run) -> None:
    facts = facts_of(tmp_path, run.model)
    trained = trained_model("model", facts, run.adapter(), run.config(), **run.sizes)
    peak = Estimate({"training": trained.items}, on_gpu=True).peak
    assert peak / GIB == pytest.approx(run.peak, rel=0.05)


@pytest.mark.parametrize(
    ("model", "targets", "sizes", "values"),
    # `values` is the number of tokens times the sum of the widths of the layers' results. `sizes`
    # (FLUX, SDXL, ROWS) has the height and width of the latents and the tokens of text.
    [
        # Flux divides latents of 128 x 128 into 4096 patches, and has 512 tokens of text. A
        # single-stream block of width 3072: queries, keys, values (3) and the first feed-forward
        # layer, 4 times as wide. JOINT is the targets in the attention layers.
        ("Flux.1-dev", JOINT, FLUX, (4096 + 512) * (3 * 3072 + 4 * 3072)),
        # The gradient also passes layers without adapters. The first feed-forward layer, with two
        # halves for GEGLU, each 4 times as wide as the tokens: 64 x 64 tokens of width 640.
        ("SDXL", ["to_q"], SDXL, 4096 * 2 * 4 * 640),
        # The first two feed-forward layers, for SwiGLU, each of width 14336; ROWS has 2048 tokens.
        ("Llama-3-8B", ["q_proj"], ROWS, 2048 * 2 * 14336),
        # The adapter is in the last layer, of width 4096. No gradient reaches the layers before it.
        ("Llama-3-8B", ["model.layers.31.mlp.down_proj"], ROWS, 2048 * 4096),
    ],
    ids=str,
)
def test_the_widest_gradient_is_that_of_all_layers_with_one_input(
    tmp_path: Path, model: str, targets: list[str], sizes: dict[str, int], values: int
) -> None:
    config = tc.LoraConfig(target_modules=targets)
    assert facts_of(tmp_path, model).widest_gradient(config, **sizes) == values
