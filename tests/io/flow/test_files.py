"""Adapter files of SD3.5 and Flux under everybody's names, out and in."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

from .conftest import KINDS, Family, merged

CANNOT = {
    # Queries, keys, values and the middle of the MLP are one matrix under these names.
    ("kohya", "lokr"): "it is no such product of two factors; save with format \"comfyui\"",
    ("kohya", "dora_input"): "one magnitude for each input there",
    ("kohya", "dora_attention"): "would change the layers in it that have no adapter",
    ("diffusers", "loha"): 'save with format "comfyui"',
    ("diffusers", "lokr"): 'save with format "comfyui"',
    ("diffusers", "dora_input"): "no DoRA with a magnitude for each input",
    ("peft", "dora_input"): "no DoRA with a magnitude for each input",
}  # fmt: skip


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya", "peft"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_come_back_as_they_were(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str, format: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    model = family.load()
    adapter = attach(model, kind)
    if message := CANNOT.get((format, kind)):
        with pytest.raises(tc.ArgumentError, match=message):
            adapter.save(path, format=format)
        assert not path.exists()
        return
    assert adapter.save(path, format=format) == []
    before = {name: var.numpy() for name, var in adapter.named_parameters().items()}
    drawn, expected = family.predict(model), merged(model)
    model.remove_adapter()
    again = model.load_adapter(path)
    assert again.named_parameters().keys() == before.keys()
    for name, var in again.named_parameters().items():
        np.testing.assert_allclose(var.numpy(), before[name], rtol=1e-5, atol=1e-6, err_msg=name)
    found = merged(model)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)
    # Ranks and alphas are those of training too.
    model.remove_adapter()
    fresh = model.add_adapter(tc.LoraConfig(**KINDS[kind]))
    fresh.load(path)
    np.testing.assert_allclose(family.predict(model), drawn, rtol=1e-4, atol=1e-4)


def test_the_default_form_has_the_scale_in_its_factors(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path
) -> None:
    model = family.load()
    adapter = attach(model, "rslora")
    adapter.save(tmp_path / "adapter.safetensors")
    tensors = tc.load_file(tmp_path / "adapter.safetensors")
    layer = "transformer_blocks.0.attn.to_q"
    up = adapter.named_parameters()[f"{layer}.lora_B.weight"].numpy()
    # alpha / sqrt(rank) is 6 / 2.
    found = tensors[f"transformer.{layer}.lora_B.weight"].numpy()
    np.testing.assert_allclose(found, 3 * up, rtol=1e-6)
    assert not any(name.endswith(".alpha") for name in tensors)
    report = tc.verify_adapter(
        tmp_path / "adapter.safetensors", family.name, family.pipeline(tmp_path / "base")
    )
    assert report.good
    assert all(m.scale == 1 for m in report.modules)
    assert {tool for m in report.modules for tool in m.ignored_by} == {"kohya", "peft"}
