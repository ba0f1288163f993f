"""Two processes together encode each image and caption once; losses equal those of one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from trainable_candle.run import LOG
from trainable_candle.train.logs import read_log


def pictures(folder: Path) -> Path:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(5):
        pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a b{number}")
    return folder


def trained(base: Path, folder: Path, output: Path, *more: str) -> str:
    """Train, and return the standard output of the run."""
    command = [sys.executable, "-m", "trainable_candle", "train", "--model", "sdxl"]
    places = ["--weights", str(base), "--dataset", str(folder), "--output", str(output)]
    small = ["--resolution", "64", "--steps", "3", "--rank", "2", "--device", "cpu"]
    result = subprocess.run(
        [*command, *places, *small, *more], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_two_processes_fill_the_caches_together(sdxl_base: Path, tmp_path: Path) -> None:
    one, two = pictures(tmp_path / "a"), pictures(tmp_path / "b")
    trained(sdxl_base, one, tmp_path / "one", "--gradient-accumulation", "2")
    said = trained(sdxl_base, two, tmp_path / "two", "--gpus", "2")
    assert "captions: 0 found, 6 made" in said
    assert "latents of 5 images: 0 found, 5 made" in said
    entries = [
        {path.relative_to(folder) for path in (folder / ".trainable-candle").rglob("*")}
        for folder in (one, two)
    ]
    assert entries[0] == entries[1]
    losses = [
        [float(row["loss"]) for row in read_log(tmp_path / name / LOG)] for name in ("one", "two")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
