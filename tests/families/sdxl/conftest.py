"""A fixture for the tests of SDXL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.train import TrainConfig


@pytest.fixture
def configure(sdxl_folder: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """A function that returns settings of a run on `sdxl_folder`; arguments replace defaults."""

    def configure(**given: Any) -> TrainConfig:
        settings = {
            "resolution": 64,
            "cache": "memory",
            "rank": 4,
            "device": "cpu",
            "precision": "f32",
        } | given
        return TrainConfig(
            model="sdxl", dataset=str(sdxl_folder), output=str(tmp_path / "out"), **settings
        )

    return configure
