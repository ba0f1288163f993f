"""Every optimizer trains a flow model, and a resumed run gives the same bits as an unbroken one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.run import LOG, train_adapter
from trainable_candle.settings.training import OPTIMIZERS
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_json_log, read_log
from trainable_candle.train.state import checkpoint_path

# Learning rates of the optimizers for which 1e-2 is too low. Prodigy multiplies its own estimate by
# the rate; the updates of SGD are as small as the gradients, and those of Adafactor as small as the
# parameters, which are 0 in the factors B.
RATES = {"prodigy": 1.0, "sgd": 1.0, "adafactor": 1.0}
# Arguments that give optimizers states, which a resumed run must restore. By default, the tiny
# model's factors have too few values for 8-bit states, and SGD has no state.
ARGUMENTS = {"sgd": ["momentum=0.9"]} | {
    name: ["min_8bit_size=16"] for name in OPTIMIZERS if name.endswith("8bit")
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the runs share, so that only the first one encodes the images."""
    return tmp_path_factory.mktemp("cache")


def values(adapter: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor in a file."""
    return {name: tensor.numpy().tobytes() for name, tensor in tc.load_file(adapter).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_flux_and_resumes_bit_for_bit(
    optimizer: str,
    flux_base: Path,
    configure: Callable[..., TrainConfig],
    cache: Path,
    tmp_path: Path,
) -> None:
    def train(output: str, **given: Any) -> None:
        config = configure(
            "flux", flux_base, output, cache="disk", cache_dir=str(cache), optimizer=optimizer,
            optimizer_args=ARGUMENTS.get(optimizer, []), steps=4, save_every=2,
            learning_rate=RATES.get(optimizer, 1e-2), validation_split=0.125, validate_every=4,
            **given,
        )  # fmt: skip
        train_adapter(config, progress=False, report=lambda _: None)

    train("unbroken")
    rows = read_json_log(tmp_path / "unbroken" / "train.jsonl")
    # Validation runs before the first step and after the last.
    before, after = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert after < before
    train("resumed", resume=str(checkpoint_path(tmp_path / "unbroken", 2)))
    unbroken, resumed = (values(tmp_path / n / "adapter.safetensors")
                         for n in ("unbroken", "resumed"))  # fmt: skip
    assert resumed == unbroken
    # The steps that the resumed run repeated changed every tensor.
    earlier = tmp_path / "unbroken" / "adapter-step000002.safetensors"
    assert all(unbroken[name] != value for name, value in values(earlier).items())
    losses, again = ([row["loss"] for row in read_log(tmp_path / n / LOG)]
                     for n in ("unbroken", "resumed"))  # fmt: skip
    assert again == losses[2:]
