"""A fixture for the tests of flow models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.train import TrainConfig


@pytest.fixture
def configure(sdxl_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Return a function that returns settings of a run on `sdxl_folder`.

    `name` is the family, `base` its weights, and `output` the folder of the run, in `tmp_path`.
    The other arguments replace small defaults.
    """

    def configure(name: str, base: Path, output: str = "out", **given: Any) -> TrainConfig:
        settings = {
            "resolution": 32, "max_side": 48, "cache": "memory", "rank": 4, "device": "cpu",
            "precision": "f32",
        } | given  # fmt: skip
        return TrainConfig(
            model=name, weights=str(base), dataset=str(sdxl_folder),
            output=str(tmp_path / output), **settings,
        )  # fmt: skip

    return configure
