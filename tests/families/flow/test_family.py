"""Families of flow models from a pipeline's folder to an adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainable_candle import families
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig


@pytest.fixture(params=["sd3", "flux"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(name: str, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{name}_base")


@pytest.fixture
def configure(
    name: str, base: Path, sdxl_folder: Path, tmp_path: Path
) -> Callable[..., TrainConfig]:
    def configure(**given: Any) -> TrainConfig:
        settings = {
            "resolution": 32, "max_side": 48, "cache": "memory", "rank": 4, "device": "cpu",
            "precision": "f32",
        } | given  # fmt: skip
        return TrainConfig(
            model=name, weights=str(base), dataset=str(sdxl_folder), output=str(tmp_path / "out"),
            **settings,
        )  # fmt: skip

    return configure


def test_a_run_from_images_to_an_adapter(
    name: str, base: Path, configure: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = configure(
        steps=3, batch_size=2, sample_prompts=["a blur"], sample_steps=2, sample_every=3,
        validation_split=0.25, validate_every=3,
    )  # fmt: skip
    result = train_adapter(config)
    assert np.isfinite(result.losses).all() if hasattr(result, "losses") else True
    adapters = list((tmp_path / "out").glob("*.safetensors"))
    assert adapters
    task = families.load(name, base, "f32", "cpu")
    before = task.draw(["a blur"], SampleOptions(steps=2, size=(32, 16)))
    assert before.shape == (1, 16, 32, 3)
    task.load_adapter(adapters[0], 1.0)
    assert (task.draw(["a blur"], SampleOptions(steps=2, size=(32, 16))) != before).any()
