"""The guidance scale that Flux.1-dev reads: in training `--train-guidance`, else `--guidance`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.families.flux import Flux
from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig

Train = Callable[..., list[list[float] | None]]


class Spy:
    """Calls a transformer, and appends the guidance scales of each call to `seen`."""

    def __init__(self, model: tc.models.FluxTransformer, seen: list[list[float] | None]) -> None:
        self._model = model
        self._seen = seen

    def __call__(self, tokens: tc.Tensor, *conditions: Any) -> tc.Tensor:
        guidance = conditions[-1]
        self._seen.append(None if guidance is None else guidance.tolist())
        return self._model(tokens, *conditions)


@pytest.fixture
def train(
    configure: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Train:
    """Return a function that trains, and returns the scales in each call of the transformer."""
    predict = Flux.predict

    def train(weights: Path, model: str = "flux", **given: Any) -> list[list[float] | None]:
        seen: list[list[float] | None] = []

        def spied(self: Flux, *arguments: Any) -> tc.Tensor:
            transformer = self.model
            # Only `predict` gets the spy: saving, for example, needs the transformer itself.
            with monkeypatch.context() as patch:
                patch.setitem(vars(self), "model", Spy(transformer, seen))
                return predict(self, *arguments)

        monkeypatch.setattr(Flux, "predict", spied)
        output = f"out{len(list(tmp_path.iterdir()))}"
        settings = {"steps": 2, "batch_size": 2, "save_every": 0}
        train_adapter(configure(model, weights, output, **settings | given))
        return seen

    return train


@pytest.mark.parametrize(("given", "scale"), [({}, 1.0), ({"train_guidance": 2.5}, 2.5)])
def test_each_image_of_a_training_batch_is_read_with_the_training_guidance(
    given: dict[str, float], scale: float, flux_base: Path, train: Train
) -> None:
    assert train(flux_base, **given) == [[scale, scale]] * 2
    validated = train(flux_base, **given, validation_split=0.25, validate_every=2)
    assert len(validated) > 2
    assert None not in validated
    assert {value for call in validated for value in call} == {scale}


@pytest.mark.parametrize(("given", "scale"), [({}, 3.5), ({"guidance": 6.0}, 6.0)])
def test_previews_are_drawn_with_the_guidance_of_sampling(
    given: dict[str, float], scale: float, flux_base: Path, train: Train
) -> None:
    seen = train(flux_base, **given, train_guidance=2.5, sample_prompts=["a"], sample_steps=1)
    # One preview before the first step, and one after the last.
    assert seen == [[scale], [2.5, 2.5], [2.5, 2.5], [scale]]


def test_a_model_without_a_guidance_embedding_gets_no_guidance_and_rejects_the_setting(
    flux_base: Path, chroma_base: Path, train: Train, tmp_path: Path
) -> None:
    schnell = tmp_path / "schnell"
    shutil.copytree(flux_base, schnell)
    path = schnell / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guidance_embeds": False}))
    path = schnell / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = tc.load_file(path)
    tc.save_file({key: t for key, t in tensors.items() if "guidance" not in key}, path)
    assert train(schnell) == [None, None]
    with pytest.raises(ConfigError, match="--train-guidance has no effect on Flux schnell"):
        train(schnell, train_guidance=2.5)
    with pytest.raises(ConfigError, match="--train-guidance: has no effect on the model"):
        train(chroma_base, model="chroma", train_guidance=2.5)
