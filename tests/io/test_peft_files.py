"""Files in peft's format: the scales that peft applies, and the folder that it loads."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

Attach = Callable[[tc.models.Model, str], tc.AdapterSet]
PREFIX = "base_model.model."


def merged(model: tc.models.Model) -> dict[str, np.ndarray]:
    model.merge_adapter()
    return {name: t.numpy() for name, t in model.named_tensors().items()}


def delta(module: dict[str, np.ndarray], kernel: tuple[int, ...]) -> np.ndarray:
    """The low-rank change of a weight by the formulas of peft's layers, without the scale."""
    if "lora_A.weight" in module:
        down, up = module["lora_A.weight"], module["lora_B.weight"]
        return (up.reshape(len(up), -1) @ down.reshape(len(down), -1)).reshape(
            len(up), down.shape[1], *kernel
        )
    if "hada_w1_a" in module:
        first = module["hada_w1_a"] @ module["hada_w1_b"]
        both = first * (module["hada_w2_a"] @ module["hada_w2_b"])
        return both.reshape(len(both), -1, *kernel)
    small, large = (
        module[name] if name in module else module[f"{name}_a"] @ module[f"{name}_b"]
        for name in ("lokr_w1", "lokr_w2")
    )
    large = large.reshape(len(large), -1, *kernel)
    return np.kron(small.reshape(*small.shape, *(1 for _ in kernel)), large)


@pytest.mark.parametrize("kind", ["lora", "rslora", "locon", "loha", "lokr", "lokr_both"])
def test_peft_scales_every_layer_by_its_configuration(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str
) -> None:
    base = {name: tensor.numpy() for name, tensor in unet.named_tensors().items()}
    attach(unet, kind).save(tmp_path / "adapter", format="peft")
    expected = merged(unet)
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules: dict[str, dict[str, np.ndarray]] = {}
    tensors = tc.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any(key.endswith("alpha") for key in tensors)
    for key, tensor in tensors.items():
        layer = max(
            (name for name in config["target_modules"] if key.startswith(f"{PREFIX}{name}.")),
            key=len,
        )
        suffix = key.removeprefix(f"{PREFIX}{layer}.")
        modules.setdefault(layer, {})[suffix] = tensor.numpy()
    assert modules.keys() == set(config["target_modules"])
    for layer, module in modules.items():
        alpha = config.get("lora_alpha", config.get("alpha"))
        scale = config["alpha_pattern"].get(layer, alpha) / config["rank_pattern"].get(
            layer, config["r"]
        )
        weight = base[f"{layer}.weight"]
        found = weight + scale * delta(module, weight.shape[2:])
        np.testing.assert_allclose(
            expected[f"{layer}.weight"], found, rtol=1e-4, atol=1e-4, err_msg=layer
        )


@pytest.mark.parametrize("in_header", [True, False])
def test_folders_load_with_a_configuration_in_a_file_or_in_the_header(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, in_header: bool
) -> None:
    adapter = attach(unet, kind)
    if kind == "dora_input":
        with pytest.raises(
            tc.ArgumentError, match="does not support DoRA with a magnitude for each input"
        ):
            adapter.save(tmp_path / "adapter", format="peft")
        assert not (tmp_path / "adapter").exists()
        return
    if kind == "oft":
        with pytest.raises(tc.ArgumentError, match="rotate inputs, and this OFT rotates outputs"):
            adapter.save(tmp_path / "adapter", format="peft")
        return
    tmp_path.joinpath("adapter").mkdir()
    adapter.save(tmp_path / "adapter", format="peft")
    expected = merged(unet)
    unet.remove_adapter()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    if in_header:
        (tmp_path / "adapter" / "adapter_config.json").unlink()
    else:
        # Remove the metadata from the header: peft's files have the configuration beside them only.
        tc.save_file(tc.load_file(weights), weights)
    for path in (tmp_path / "adapter", weights):
        unet.load_adapter(path)
        found = merged(unet)
        for name, tensor in found.items():
            np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
        unet.remove_adapter()


def test_a_folder_in_peft_format_may_have_a_dot_in_its_name(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    adapter = attach(unet, "lora")
    adapter.save(tmp_path / "x_v1.5", format="peft")
    assert (tmp_path / "x_v1.5" / "adapter_config.json").is_file()
    with pytest.raises(tc.ArgumentError, match=r'x_v1\.5 is a folder; .* or use the format "peft"'):
        adapter.save(tmp_path / "x_v1.5")


def test_a_path_with_a_suffix_is_one_file(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    attach(unet, "lora").save(tmp_path / "mine.safetensors", format="peft")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def test_a_damaged_configuration_is_reported(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    attach(unet, "lora").save(tmp_path / "adapter", format="peft")
    unet.remove_adapter()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tc.save_file(tc.load_file(weights), weights)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(tc.ConfigError, match=r"adapter_config\.json is not valid JSON: "):
        unet.load_adapter(tmp_path / "adapter")
