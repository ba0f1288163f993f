"""SDXL's text encoders, which are CLIP's, against transformers."""

from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle.models import CLIPTextModel

from .conftest import GOLDEN, assert_near, weights_of

ENCODERS = ["text_encoder", "text_encoder_2"]


def load(folder: Path, name: str, device: str = "cpu") -> CLIPTextModel:
    return CLIPTextModel.from_pretrained(folder, dtype="f32", device=device, subfolder=name)


@pytest.mark.parametrize("name", ENCODERS)
def test_features_equal_those_of_transformers(sdxl: Path, name: str, device: str) -> None:
    case = tc.load_file(GOLDEN / f"{name}_forward.safetensors")
    features = load(sdxl, name, device)(case["input_ids"].to(device))
    assert_near(features.last_hidden_state, case["last_hidden_state"])
    assert_near(features.pooled, case["pooled"])
    states = features.hidden_states
    assert len(states) == 4  # of the embedding and of three layers
    for i, state in enumerate(states):
        assert_near(state, case[f"hidden_states.{i}"])
    # `penultimate` skips the last layer; `skipped(n)`, as diffusers' `clip_skip`, skips n more.
    assert_near(features.penultimate, case["hidden_states.2"])
    assert_near(features.skipped(1), case["hidden_states.1"])
    with pytest.raises(tc.ArgumentError, match="clip_skip is 3, expected 0 to 2"):
        features.skipped(3)


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_have_the_names_of_published_files(sdxl: Path, name: str) -> None:
    # The golden file of `text_encoder` lacks the prefix that published files have.
    expected = {key if key.startswith("text_") else f"text_model.{key}" for key in weights_of(name)}
    assert set(load(sdxl, name).named_tensors()) == expected


def test_adapters_of_a_checkpointed_encoder_get_the_same_gradients(sdxl: Path) -> None:
    case = tc.load_file(GOLDEN / "text_encoder_2_forward.safetensors")
    model = load(sdxl, "text_encoder_2")
    adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules=["q_proj", "fc2"]))
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.2)

    def gradients() -> list[list[float]]:
        loss = (model(case["input_ids"]).pooled ** 2).sum()
        return [g.tolist() for g in tc.grad(loss, adapter.parameters()) if g is not None]

    plain = gradients()
    assert len(plain) == len(adapter.parameters())
    for policy in ("full", "selective"):
        model.enable_gradient_checkpointing(policy)
        assert gradients() == plain


def test_wrong_inputs_are_reported(sdxl: Path) -> None:
    model = load(sdxl, "text_encoder")  # 17 positions, tokens 0 to 199
    with pytest.raises(tc.ShapeError, match="18 tokens, expected 1 to 17"):
        model(tc.zeros((1, 18), dtype="i64"))
    with pytest.raises(tc.ShapeError, match=r"expected \(B, S\)"):
        model(tc.zeros((4,), dtype="i64"))
    with pytest.raises(tc.IndexOutOfRangeError, match="200"):
        model(tc.full((1, 3), 200, dtype="i64"))
