"""Fixtures: the settings of a short run, and a function that trains with given settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainable_candle.run import train_adapter
from trainable_candle.train import Callback, TrainConfig


@pytest.fixture
def config(digits_base: Path, digits_folder: Path, tmp_path: Path) -> TrainConfig:
    """Return the settings of 12 steps with a schedule, dropout, and checkpoints every 5 steps."""
    return TrainConfig(
        model="digits",
        weights=str(digits_base),
        dataset=str(digits_folder),
        output=str(tmp_path / "run"),
        device="cpu",
        precision="f32",
        rank=4,
        lora_dropout=0.1,
        steps=12,
        batch_size=4,
        learning_rate=1e-2,
        lr_scheduler="cosine",
        warmup_steps=2,
        save_every=5,
    )


@pytest.fixture(scope="session")
def train() -> Callable[..., dict[str, bytes]]:
    """Return a function that trains an adapter and returns the bytes of its parameters by name."""

    def train(config: TrainConfig, *callbacks: Callback) -> dict[str, bytes]:
        run = train_adapter(config, callbacks=callbacks, progress=False, report=lambda _: None)
        parameters = run.adapter.named_parameters()
        values = {name: var.detach().to("f32").numpy() for name, var in parameters.items()}
        return {name: value.tobytes() for name, value in values.items()}

    return train
