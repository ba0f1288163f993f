"""Real photographs on the built-in SDXL, as the README shows it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainable_candle.train.logs import read_json_log

PHOTOGRAPHS = Path(__file__).parents[2] / "examples" / "photos"


@pytest.mark.slow
def test_photographs_are_learned(tmp_path: Path) -> None:
    """On noises and timesteps that stay the same, the loss falls by a quarter."""
    output = tmp_path / "run"
    settings = {
        "model": "sdxl",
        "dataset": PHOTOGRAPHS,
        "validation-dataset": PHOTOGRAPHS,
        "validate-every": 75,
        "output": output,
        "cache": "memory",
        "rank": 16,
        "steps": 150,
        "batch-size": 4,
        "learning-rate": 2e-3,
        "target-modules": "all-linear",
        "sample-prompts": "a photo of a cup of coffee with a spoon on a red plate",
        "sample-every": 150,
        "sample-steps": 4,
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "trainable_candle", "train", *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(list(PHOTOGRAPHS.glob("*.jpg"))) >= 20
    rows = [row for row in read_json_log(output / "train.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in rows] == [0, 75, 150]
    first, _, last = (row["validation_loss"] for row in rows)
    assert last < 0.75 * first
    pictures = []
    for step in (0, 150):
        with Image.open(output / "samples" / f"step-{step:06}.png") as image:
            pictures.append(np.asarray(image).astype(float))
    assert np.abs(pictures[0] - pictures[1]).mean() > 5
