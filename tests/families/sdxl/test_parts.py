"""SDXL's text encoders and its autoencoder in files outside the weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig

ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.fixture
def separate(sdxl_base: Path, tmp_path: Path) -> tuple[Path, TrainConfig]:
    """A folder with the UNet and the tokenizers alone, and settings that name the other parts."""
    weights = tmp_path / "weights"
    parts = tmp_path / "parts"
    shutil.copytree(sdxl_base, weights)
    parts.mkdir()
    for part in (*ENCODERS, "vae"):
        shutil.move(weights / part, parts / part)
    encoders = [str(parts / part) for part in ENCODERS]
    return weights, TrainConfig(text_encoder=encoders, vae=str(parts / "vae"))


def test_separate_parts_give_the_latents_and_images_of_the_pipeline(
    separate: tuple[Path, TrainConfig], sdxl_base: Path
) -> None:
    weights, config = separate
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    tasks = [
        families.load("sdxl", weights, "f32", "cpu", config),
        families.load("sdxl", sdxl_base, "f32", "cpu"),
    ]
    # Without `normal`, which draws noise, the latents are the means of the encoded distributions.
    latents = [
        task.family.coder.latents(task.family.coder.encode(pixels), normal=None).numpy()
        for task in tasks
    ]
    np.testing.assert_array_equal(*latents)
    options = SampleOptions(steps=1, size=(16, 16))
    np.testing.assert_array_equal(*(task.draw(["a"], options) for task in tasks))


def test_the_error_for_weights_without_an_autoencoder_names_the_flag(
    separate: tuple[Path, TrainConfig], sdxl_file: Path, tmp_path: Path
) -> None:
    folder, config = separate
    shutil.copytree(sdxl_file.parent, tmp_path / "file")
    file = tmp_path / "file" / sdxl_file.name
    # Write the copied file anew, without the autoencoder.
    parts = {name: tc.models.load(sdxl_file, subfolder=name) for name in ("unet", *ENCODERS)}
    tc.models.save_checkpoint(file, parts)
    in_file = TrainConfig(vae=config.vae)
    for weights, complete, missing in ((folder, config, "folder vae"), (file, in_file, "vae")):
        message = f"it has no {missing}; give the files of these parts with --vae$"
        with pytest.raises(tc.WeightsFormatError, match=message):
            families.load("sdxl", weights, "f32", "cpu", complete.with_(vae=None))
        families.load("sdxl", weights, "f32", "cpu", complete)
