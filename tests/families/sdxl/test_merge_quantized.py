"""`merge --to` of SDXL, whose adapters may include those of text encoders."""

from pathlib import Path

import pytest
from tests.families.merging import losses_in, make_adapter, merge

from trainable_candle import families
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.train import TrainConfig


@pytest.fixture
def adapters(sdxl_base: Path, tmp_path: Path) -> list[str]:
    """Return the flags for adapters of the UNet and of both text encoders, in this order."""
    parts = ("unet", "text_encoder", "text_encoder_2")
    files = [make_adapter(sdxl_base, part, tmp_path / f"{part}.safetensors") for part in parts]
    return [text for file in files for text in ("--adapter", str(file))]


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
