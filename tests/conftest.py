"""What tests of several areas need: a small model on disk, and a folder of pictures for it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.models import DigitsTransformer


@pytest.fixture(scope="session")
def digits_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits transformer of one narrow block, its weights random: a fresh one is constant."""
    folder = tmp_path_factory.mktemp("model") / "base"
    state = tc.get_rng_state()
    tc.manual_seed(0)
    model = DigitsTransformer(num_layers=1, num_attention_heads=2, attention_head_dim=8)
    for var in model.named_parameters().values():
        var.set(tc.randn(var.shape) * 0.3)
    model.save_pretrained(folder)
    tc.set_rng_state(state)
    return folder


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures of 8x8 pixels with captions."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for number in range(10):
        pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {number}")
    return folder
