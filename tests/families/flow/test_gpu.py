"""Flow models compute nearly the same on a CUDA device as on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.models import CausalLM
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import SampleOptions
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_log

pytestmark = pytest.mark.gpu


def test_hidden_states_of_padded_texts_are_near_those_of_the_cpu(
    gpu: str, flux2_base: Path
) -> None:
    tokens = np.arange(40)
    # The first `text_tokens` of the 40 tokens are the text, the other ones padding.
    for text_tokens in (1, 23, 40):
        # For each device, the states after 3 layers and after 9.
        states = [
            CausalLM.from_pretrained(
                flux2_base / "text_encoder", layers=9, dtype="f32", device=device
            ).padded_states(tc.tensor(tokens, device=device), text_tokens, [3, 9])
            for device in ("cpu", gpu)
        ]
        for expected, found in zip(*states, strict=True):
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["chroma", "zimage", "flux2", "qwen-image"])
def test_losses_over_a_training_adapter_are_near_those_of_the_cpu(
    gpu: str,
    name: str,
    request: pytest.FixtureRequest,
    configure: Callable[..., TrainConfig],
    tmp_path: Path,
) -> None:
    """Losses are near also after previews between the steps, which turn the training adapter off.

    A training adapter is a frozen adapter that is applied in training steps only, besides the
    trained one. On the GPU, the steps are CUDA graphs that include the training adapter.
    """
    base = request.getfixturevalue(f"{name.replace('-', '_')}_base")

    def losses(output: str, device: str, **given: Any) -> list[float]:
        settings = {"steps": 6, "sample_prompts": ["a"], "sample_steps": 2, "sample_every": 3}
        train_adapter(configure(name, base, output, device=device, **settings | given))
        return [float(row["loss"]) for row in read_log(tmp_path / output / "train.csv")]

    # The adapter of a short first run is the training adapter of the two compared runs. A
    # `max_grad_norm` of 0 does not limit the gradients.
    losses("first", "cpu", steps=2, learning_rate=1e-2, max_grad_norm=0.0)
    given = {"training_adapter": str(tmp_path / "first" / "adapter.safetensors")}
    expected, found = losses("cpu", "cpu", **given), losses("gpu", gpu, **given)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    # The GPU also draws with the adapter that was trained on it.
    task = families.load(name, base, "f32", gpu)
    task.load_adapter(tmp_path / "gpu" / "adapter.safetensors", 1.0)
    # `size` is (width, height); the images have shape (images, height, width, channels).
    assert task.draw(["a"], SampleOptions(steps=2, size=(32, 16))).shape == (1, 16, 32, 3)
