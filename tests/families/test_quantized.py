"""Runs over quantized models and text encoders have losses near those over unquantized ones."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.run import train_adapter
from trainable_candle.tasks.estimate import ITEM_BYTES
from trainable_candle.train import TrainConfig
from trainable_candle.train.logs import read_json_log


@pytest.fixture(params=["sdxl", "sd3", "flux", "chroma", "zimage", "flux2", "qwen-image"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def config(
    name: str, sdxl_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> TrainConfig:
    base = f"{name.replace('-', '_')}_base"
    return TrainConfig(
        model=name, weights=str(request.getfixturevalue(base)), dataset=str(sdxl_folder),
        output=str(tmp_path / "values"), resolution=32, max_side=48, cache="memory", rank=4,
        device="cpu", precision="f32", steps=5, learning_rate=1e-3,
    )  # fmt: skip


def losses(config: TrainConfig) -> list[float]:
    run = train_adapter(config, progress=False, report=lambda _: None)
    return [row["loss"] for row in read_json_log(run.output / "train.jsonl") if "loss" in row]


def test_losses_are_near_those_over_the_unquantized_model(
    config: TrainConfig, tmp_path: Path
) -> None:
    expected = losses(config)
    # Rounding to four bits changes the tiny Chroma by more than 10 %: its tokens have 8 features.
    form = "int8" if config.model == "chroma" else "nf4"
    settings = {"base_precision": form, "text_encoder_precision": "int8"}
    found = losses(config.with_(output=str(tmp_path / "codes"), **settings))
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.1)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_losses_with_products_of_codes_are_near_those_of_values(
    config: TrainConfig, tmp_path: Path, form: str
) -> None:
    if config.model == "chroma":
        pytest.skip("the tiny Chroma has no layer that W8A8 applies to")
    config = config.with_(base_precision=form)
    expected = losses(config)
    found = losses(config.with_(output=str(tmp_path / "codes"), w8a8=True))
    # W8A8 applies to layers whose numbers of input and output features are multiples of 16. The
    # tiny UNet has no such layer, but with W8A8 fewer of its layers are quantized.
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert not tc.get_w8a8()


def test_products_of_codes_need_an_8_bit_base(config: TrainConfig) -> None:
    with pytest.raises(tc.ConfigError, match="--base-precision int8 or fp8"):
        losses(config.with_(base_precision="nf4", w8a8=True))


def test_the_estimate_counts_the_bytes_of_quantized_weights(config: TrainConfig) -> None:
    def weights(**settings: Any) -> dict[str, int]:
        given = config.with_(precision="bf16", **settings)
        family = families.find(given.model)(Path(given.weights), "bf16", "cpu", given)
        task = family.task()
        estimate = task.estimate(given, task.read(lambda _: None))
        items = [item for phase in estimate.phases.values() for item in phase]
        return {item.component: item.bytes for item in items if item.what == "weights"}

    plain, codes = weights(), weights(base_precision="nf4", text_encoder_precision="int8")
    component = "unet" if config.model == "sdxl" else "transformer"
    assert codes[component] < plain[component]
    assert codes["text encoders"] < plain["text encoders"]
    assert codes["vae"] == plain["vae"]
    family = families.find(config.model)(Path(config.weights), "bf16", "cpu", config)
    facts = family.facts
    assert plain[component] == facts.parts[component].elements * ITEM_BYTES["bf16"]
    assert codes[component] == facts.parts[component].weight_bytes("bf16", "nf4")


@pytest.fixture
def fp8_base(flux_base: Path, tmp_path: Path) -> Path:
    """A tiny Flux with its T5 in ComfyUI's fp8; its CLIP is not quantized."""
    folder = tmp_path / "fp8"
    shutil.copytree(flux_base, folder)
    layers = tc.inspect(folder, "flux").parts["text_encoder_2"].layers
    (weights,) = (folder / "text_encoder_2").glob("*.safetensors")
    quantized = {}
    codes = {}
    for name, tensor in tc.load_file(weights).items():
        if name.removesuffix(".weight") not in layers:
            quantized[name] = tensor
            continue
        found = tc.quantize(tensor.to("f32"), "fp8").tensors()
        quantized[name] = found["codes"].reshape(tensor.shape)
        quantized[f"{name}_scale"] = found["scales"].reshape(-1, 1)
        codes[name] = "fp8"
    assert codes.keys() == {f"{layer}.weight" for layer in layers}
    tc.save_file(quantized, weights, codes=codes)
    return folder


def flux(base: Path, data: Path, **settings: Any) -> Any:
    config = TrainConfig(
        model="flux", weights=str(base), dataset=str(data), resolution=32, max_side=48,
        cache="memory", device="cpu", precision="bf16", **settings,
    )  # fmt: skip
    return families.find("flux")(base, "bf16", "cpu", config)


def text_bytes(family: Any) -> int:
    task = family.task()
    estimate = task.estimate(family.config, task.read(lambda _: None))
    items = [item for item in estimate.phases["encoding captions"] if item.what == "weights"]
    (texts,) = [item.bytes for item in items if item.component == "text encoders"]
    assert estimate.work.texts_have_format
    return texts


def values(tensor: tc.Tensor) -> np.ndarray:
    return tensor.to("f32").numpy()


def test_text_encoders_take_the_formats_of_their_files(fp8_base: Path, sdxl_folder: Path) -> None:
    stored = flux(fp8_base, sdxl_folder, text_encoder_precision="stored")
    assert {part: stored.source(part)["quantize"] for part in stored.facts.text_encoders} == {
        "text_encoder": None, "text_encoder_2": "fp8",
    }  # fmt: skip
    assert stored.text_precision == "bf16 same fp8"
    # With --text-encoder-precision fp8, CLIP is rounded too, so caches of captions differ.
    both = flux(fp8_base, sdxl_folder, text_encoder_precision="fp8")
    assert both.text_precision == "bf16 fp8"
    assert both.text_identity() != stored.text_identity()
    plain = flux(fp8_base, sdxl_folder, text_encoder_precision="same")
    facts = plain.facts
    assert text_bytes(plain) == facts.bytes("bf16", *facts.text_encoders)
    saved = text_bytes(plain) - text_bytes(stored)
    # A weight in fp8 takes a byte less than in bf16, and each row has a scale in f32.
    layers = facts.parts["text_encoder_2"].layers.values()
    assert saved == sum(rows * columns - 4 * rows for rows, columns in layers)
    # Keeping the codes of the file rounds nothing.
    captions = ["one small red heart"]
    expected, found = plain.features(captions), stored.features(captions)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(values(found[name]), values(tensor), name)
    rounded = flux(fp8_base, sdxl_folder, text_encoder_precision="int8").features(captions)
    assert any(
        not np.array_equal(values(rounded[name]), values(tensor))
        for name, tensor in expected.items()
    )
