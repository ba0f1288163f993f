"""`merge --to` of SDXL, whose adapters may include those of text encoders."""

import re
from pathlib import Path

import pytest
from tests.families.merging import (
    check_codes,
    check_that_loading_keeps_codes,
    losses_in,
    make_adapter,
    merge,
)

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.train import TrainConfig


@pytest.fixture
def adapters(sdxl_base: Path, tmp_path: Path) -> list[str]:
    """Return the flags for adapters of the UNet and of both text encoders, in this order."""
    parts = ("unet", "text_encoder", "text_encoder_2")
    files = [make_adapter(sdxl_base, part, tmp_path / f"{part}.safetensors") for part in parts]
    return [text for file in files for text in ("--adapter", str(file))]


@pytest.mark.parametrize("weights", ["folder", "file"])
@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_files_have_comfyuis_format_and_loading_keeps_their_codes(
    to: str, weights: str, adapters: list[str], sdxl_base: Path, sdxl_file: Path, tmp_path: Path
) -> None:
    if weights == "file":
        # `sdxl_file` has no tokenizers, which `merge` loads with the text encoders.
        given = ["--model", "sdxl", "--weights", str(sdxl_file), *adapters[:2]]
    else:
        given = ["--model", "sdxl", "--weights", str(sdxl_base), *adapters]
    plain, written = tmp_path / "plain.safetensors", tmp_path / "written.safetensors"
    assert merge(given, plain) == 0
    assert merge(given, written, "--to", to) == 0
    # The linear layers of the transformers are quantized, with those before and after the blocks.
    # The UNet's convolutions and embeddings, and the other parts, are as in the unquantized file.
    layer = r"model\.diffusion_model\..*\.(transformer_blocks\..*|proj_in|proj_out)\.weight"
    matrices = {key for key, tensor in tc.load_file(plain).items() if tensor.ndim == 2}
    expected = {key for key in matrices if re.fullmatch(layer, key)}
    assert len(expected) > 100
    assert check_codes(plain, written, to) == expected
    check_that_loading_keeps_codes(written, "unet", to)


@pytest.mark.parametrize("to", ["fp8", "int8", "nf4"])
def test_the_loss_after_merging_is_that_of_all_merged_parts(
    to: str,
    adapters: list[str],
    sdxl_base: Path,
    sdxl_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", "sdxl", "--weights", str(sdxl_base)]
    data = ("--to", to, "--dataset", str(sdxl_folder), "--resolution", "32", "--max-side", "48")
    suffix = "" if to == "nf4" else ".safetensors"

    def losses(output: str, adapters: list[str]) -> tuple[float, float]:
        assert merge([*given, *adapters], tmp_path / f"{output}{suffix}", *data) == 0
        return losses_in(capsys.readouterr().out)

    before, after = losses("merged", adapters)
    before_unet, after_unet = losses("merged unet", adapters[:2])
    # The text encoders' adapters change both losses by about as much.
    change = before - before_unet
    assert abs(change) > 0.05
    assert after != before
    assert after - after_unet == pytest.approx(change, rel=0.5)
    if to == "nf4":  # The output is a folder with tokenizers.
        config = TrainConfig(resolution=32, max_side=48)
        task = families.load("sdxl", tmp_path / "merged", "f32", "cpu", config)
        assert isinstance(task, LatentTask)
        assert after == pytest.approx(task.loss_on(str(sdxl_folder)), abs=1e-4)
