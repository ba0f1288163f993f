"""Errors of adapter files that do not fit a model, and of a second adapter on a model."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

SDXL = Path(__file__).parents[1] / "golden" / "sdxl"
# The fixture `attach` adds an adapter of the given kind to a model, with values other than initial.
Attach = Callable[[tc.models.Model, str], tc.AdapterSet]


def encoder() -> tc.models.CLIPTextModel:
    return tc.models.CLIPTextModel.from_pretrained(SDXL / "text_encoder", dtype="f32")


def test_a_second_adapter_on_a_model_is_rejected(unet: tc.models.SDXLUNet, tmp_path: Path) -> None:
    base = {name: tensor.numpy() for name, tensor in unet.named_tensors().items()}
    adapter = unet.add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))
    for var in adapter.parameters():
        var.set(tc.ones_like(var))
    adapter.save(tmp_path / "adapter.safetensors")
    with pytest.raises(tc.ConfigError, match=r"^add_adapter: .* already; call remove_adapter\(\)"):
        unet.add_adapter(tc.LoraConfig(r=2, target_modules=["to_k"]))
    unet.merge_adapter()  # A merged adapter is still the model's one adapter.
    with pytest.raises(tc.ConfigError, match=r"^load_adapter: .* already; call remove_adapter\(\)"):
        unet.load_adapter(tmp_path / "adapter.safetensors")
    unet.remove_adapter()
    for name, tensor in unet.named_tensors().items():
        np.testing.assert_array_equal(tensor.numpy(), base[name], err_msg=name)
    unet.load_adapter(tmp_path / "adapter.safetensors")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_values_in_a_file_are_reported(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, number: float
) -> None:
    path = tmp_path / "adapter.safetensors"
    adapter = attach(unet, "lora")
    var = adapter.parameters()[1]  # lora_B of the first adapted layer
    var.set(tc.full(var.shape, number))
    adapter.save(path)
    with pytest.raises(tc.WeightsFormatError, match=r"to_q.lora_B.weight has non-finite elements"):
        adapter.load(path)
    unet.remove_adapter()
    with pytest.raises(tc.WeightsFormatError, match=r"to_q.lora_B.weight has non-finite elements"):
        unet.load_adapter(path)
    faults = [module.fault for module in tc.verify_adapter(path, weights=SDXL).modules]
    assert sum(fault is not None and "non-finite" in fault for fault in faults) == 1


def test_a_file_without_tensors_is_rejected(unet: tc.models.SDXLUNet, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    tc.save_file({}, path)
    with pytest.raises(tc.WeightsFormatError, match="it has no tensors"):
        unet.load_adapter(path)


def test_a_file_without_the_adapter_of_the_part_is_rejected(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    for format in ("kohya", "comfyui", "diffusers"):
        path = tmp_path / f"{format}.safetensors"
        attach(unet, "lora").save(path, format=format)
        unet.remove_adapter()
        message = "the file has no adapter for the text_encoder:"
        with pytest.raises(tc.WeightsFormatError, match=message):
            encoder().load_adapter(path)
    attach(text := encoder(), "lora").save(path, format="kohya")
    text.remove_adapter()
    with pytest.raises(tc.WeightsFormatError, match=r"no adapter for the unet: .* \(lora_te1_\)"):
        unet.load_adapter(path)


@pytest.mark.parametrize(
    ("in_file", "in_model", "message"),
    [
        (
            {"r": 4, "lora_alpha": 2.0},
            {"r": 8, "lora_alpha": 2.0},
            r"rank 4 and alpha 2, this adapter is of rank 8 and alpha 2; .*--rank 4 --alpha 2\)",
        ),
        (
            {"r": 4, "lora_alpha": 2.0},
            {"r": 4, "lora_alpha": 3.0},
            r"rank 4 and alpha 2, this adapter is of rank 4 and alpha 3; .*--rank 4 --alpha 2\)",
        ),
        ({"use_dora": True}, {}, r'a "dora", this adapter is a "lora"; .*\(--adapter dora\)'),
        ({}, {"use_dora": True}, r'a "lora", this adapter is a "dora"; .*\(--adapter lora\)'),
        ({"adapter": "lokr"}, {"adapter": "loha"}, r'a "lokr", .* \(--adapter lokr\)'),
    ],
)
@pytest.mark.parametrize("format", ["kohya", "peft"])
def test_a_file_of_another_rank_alpha_or_kind_is_rejected(
    unet: tc.models.SDXLUNet,
    tmp_path: Path,
    in_file: dict[str, object],
    in_model: dict[str, object],
    message: str,
    format: str,
) -> None:
    path = tmp_path / "adapter.safetensors"
    config = {"target_modules": ["to_q", "to_k"]}
    unet.add_adapter(tc.LoraConfig(**config | in_file)).save(path, format=format)  # type: ignore[arg-type]
    unet.remove_adapter()
    adapter = unet.add_adapter(tc.LoraConfig(**config | in_model))  # type: ignore[arg-type]
    with pytest.raises(tc.ConfigError, match=message):
        adapter.load(path)


@pytest.mark.parametrize("key", ["something", "lora_unet_no_such_layer.lora_up.weight"])
def test_one_foreign_key_is_reported(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    attach(unet, "lora").save(path)
    unet.remove_adapter()
    tc.save_file(tc.load_file(path) | {key: tc.ones(2, 2)}, path)
    message = f"1 of the file's keys \\({key.removesuffix('.lora_up.weight')}\\) fit no layer"
    with pytest.raises(tc.WeightsFormatError, match=message):
        unet.load_adapter(path)
