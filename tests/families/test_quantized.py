"""Runs of image models with quantized weights: losses, estimates, formats of text encoders."""

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


def test_losses_with_quantized_weights_are_near_those_with_unquantized_ones(
    config: TrainConfig, tmp_path: Path
) -> None:
    expected = losses(config)
    # Rounding to four bits changes the tiny Chroma by more than 10 %: its tokens have 8 features.
    base_format = "int8" if config.model == "chroma" else "nf4"
    settings = {"base_precision": base_format, "text_encoder_precision": "int8"}
    found = losses(config.with_(output=str(tmp_path / "codes"), **settings))
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.1)


@pytest.mark.parametrize("base_format", ["int8", "fp8"])
def test_losses_with_w8a8_are_near_those_without(
    config: TrainConfig, tmp_path: Path, base_format: str
) -> None:
    if config.model == "chroma":
        pytest.skip("the tiny Chroma has no layer that W8A8 applies to")
    config = config.with_(base_precision=base_format)
    expected = losses(config)
    found = losses(config.with_(output=str(tmp_path / "w8a8"), w8a8=True))
    # W8A8 applies to layers whose numbers of input and output features are multiples of 16. The
    # tiny UNet has no such layer. Its losses differ because with W8A8, only the feed-forward layers
    # of a UNet have codes; without W8A8, its other layers have codes too.
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.05)
    # The run resets the process-wide switch.
    assert not tc.get_w8a8()


def test_w8a8_needs_an_8_bit_base(config: TrainConfig) -> None:
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

    plain, quantized = weights(), weights(base_precision="nf4", text_encoder_precision="int8")
    component = "unet" if config.model == "sdxl" else "transformer"
    assert quantized[component] < plain[component]
    assert quantized["text encoders"] < plain["text encoders"]
    assert quantized["vae"] == plain["vae"]
    family = families.find(config.model)(Path(config.weights), "bf16", "cpu", config)
    facts = family.facts
    assert plain[component] == facts.parts[component].elements * ITEM_BYTES["bf16"]
    assert quantized[component] == facts.parts[component].weight_bytes("bf16", "nf4")


@pytest.fixture
def fp8_base(flux_base: Path, tmp_path: Path) -> Path:
    """The folder of a tiny Flux with a T5 in ComfyUI's fp8 and a CLIP that is not quantized."""
    folder = tmp_path / "fp8"
    shutil.copytree(flux_base, folder)
    layers = tc.inspect(folder, "flux").parts["text_encoder_2"].layers
    (weights,) = (folder / "text_encoder_2").glob("*.safetensors")
    tensors = {}
    formats = {}
    for name, tensor in tc.load_file(weights).items():
        if name.removesuffix(".weight") not in layers:
            tensors[name] = tensor
            continue
        stored = tc.quantize(tensor.to("f32"), "fp8").tensors()
        tensors[name] = stored["codes"].reshape(tensor.shape)
        tensors[f"{name}_scale"] = stored["scales"].reshape(-1, 1)
        formats[name] = "fp8"
    assert formats.keys() == {f"{layer}.weight" for layer in layers}
    tc.save_file(tensors, weights, codes=formats)
    return folder


def flux(base: Path, data: Path, **settings: Any) -> Any:
    config = TrainConfig(
        model="flux", weights=str(base), dataset=str(data), resolution=32, max_side=48,
        cache="memory", device="cpu", precision="bf16", **settings,
    )  # fmt: skip
    return families.find("flux")(base, "bf16", "cpu", config)


def text_bytes(family: Any) -> int:
    """Return the estimated bytes of the weights of the text encoders of a family from `flux`."""
    task = family.task()
    estimate = task.estimate(family.config, task.read(lambda _: None))
    items = [item for item in estimate.phases["encoding captions"] if item.what == "weights"]
    (count,) = [item.bytes for item in items if item.component == "text encoders"]
    # T5's file is in fp8, whatever the settings request.
    assert estimate.work.texts_have_format
    return count


def values(tensor: tc.Tensor) -> np.ndarray:
    return tensor.to("f32").numpy()


def test_text_encoders_take_the_formats_of_their_files(fp8_base: Path, sdxl_folder: Path) -> None:
    stored = flux(fp8_base, sdxl_folder, text_encoder_precision="stored")
    assert {part: stored.source(part)["quantize"] for part in stored.facts.text_encoders} == {
        "text_encoder": None, "text_encoder_2": "fp8",
    }  # fmt: skip
    # The dtype, then the format of each encoder; "same" is no format. A format that all encoders
    # have is named once.
    assert stored.text_precision == "bf16 same fp8"
    # With --text-encoder-precision fp8, CLIP is quantized too, so the cache has other features.
    both = flux(fp8_base, sdxl_folder, text_encoder_precision="fp8")
    assert both.text_precision == "bf16 fp8"
    assert both.text_identity() != stored.text_identity()
    plain = flux(fp8_base, sdxl_folder, text_encoder_precision="same")
    facts = plain.facts
    assert text_bytes(plain) == facts.bytes("bf16", *facts.text_encoders)
    saved = text_bytes(plain) - text_bytes(stored)
    # An fp8 weight takes one byte instead of the two of bf16, but each row has a scale of 4 bytes.
    layers = facts.parts["text_encoder_2"].layers.values()
    assert saved == sum(rows * columns - 4 * rows for rows, columns in layers)
    # Keeping the codes of the file rounds nothing: both families compute the same features.
    captions = ["one small red heart"]
    expected, found = plain.features(captions), stored.features(captions)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(values(found[name]), values(tensor), name)
    rounded = flux(fp8_base, sdxl_folder, text_encoder_precision="int8").features(captions)
    assert any(
        not np.array_equal(values(rounded[name]), values(tensor))
        for name, tensor in expected.items()
    )
