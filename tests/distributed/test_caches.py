"""Two processes divide the encoding of images and captions; losses equal those of one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from trainable_candle.run import LOG
from trainable_candle.train.logs import read_log


def write_images(folder: Path) -> Path:
    """Write five random images with captions; return the folder."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a b{number}")
    return folder


def train(base: Path, images: Path, output: Path, *flags: str) -> str:
    """Train, and return the standard output of the run."""
    command = [sys.executable, "-m", "trainable_candle", "train", "--model", "sdxl"]
    places = ["--weights", str(base), "--dataset", str(images), "--output", str(output)]
    small = ["--resolution", "64", "--steps", "3", "--rank", "2", "--device", "cpu"]
    result = subprocess.run(
        [*command, *places, *small, *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_processes_make_the_caches_and_losses_of_one(sdxl_base: Path, tmp_path: Path) -> None:
    # Each run has its own copy of the images, because the caches are in the folder of the images.
    folders = [write_images(tmp_path / name) for name in ("images of one", "images of two")]
    # A step of one process accumulates the gradients of two micro-batches; in a step of two
    # processes, each computes one of them. On the CPU, `--gpus` is the number of processes.
    train(sdxl_base, folders[0], tmp_path / "one", "--gradient-accumulation", "2")
    printed = train(sdxl_base, folders[1], tmp_path / "two", "--gpus", "2")
    assert "captions: 0 found, 6 made" in printed  # Five captions and the empty one.
    assert "latents of 5 images: 0 found, 5 made" in printed
    entries = [
        {path.relative_to(folder) for path in (folder / ".trainable-candle").rglob("*")}
        for folder in folders
    ]
    assert entries[0] == entries[1]
    losses = [
        [float(row["loss"]) for row in read_log(tmp_path / name / LOG)] for name in ("one", "two")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
