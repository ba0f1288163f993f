"""Files in peft's format: the scales that peft applies, and the folders that peft loads."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

from .conftest import KINDS

# The fixture `attach` adds an adapter of a kind, a key of `KINDS`, and gives it random values that
# change the model's output.
Attach = Callable[[tc.models.Model, str], tc.AdapterSet]
PREFIX = "base_model.model."
# The kinds of adapters that peft does not have, and what the error says.
UNSUPPORTED = {
    "dora_input": "does not support DoRA with a magnitude for each input",
    "oft": "rotate inputs, and this OFT rotates outputs",
}


def merged(model: tc.models.Model) -> dict[str, np.ndarray]:
    """Merge the adapter; return the values of all tensors."""
    model.merge_adapter()
    return {name: t.numpy() for name, t in model.named_tensors().items()}


def delta(module: dict[str, np.ndarray], kernel: tuple[int, ...]) -> np.ndarray:
    """Compute the change of a weight by peft's formula for LoRA, LoHa or LoKr, without the scale.

    `kernel` is the weight's shape without outputs and inputs; it is empty for linear layers.
    """
    if "lora_A.weight" in module:
        down, up = module["lora_A.weight"], module["lora_B.weight"]
        return (up.reshape(len(up), -1) @ down.reshape(len(down), -1)).reshape(
            len(up), down.shape[1], *kernel
        )
    if "hada_w1_a" in module:
        w1 = module["hada_w1_a"] @ module["hada_w1_b"]
        w2 = module["hada_w2_a"] @ module["hada_w2_b"]
        return (w1 * w2).reshape(len(w1), -1, *kernel)
    w1, w2 = (
        module[name] if name in module else module[f"{name}_a"] @ module[f"{name}_b"]
        for name in ("lokr_w1", "lokr_w2")
    )
    w2 = w2.reshape(len(w2), -1, *kernel)
    return np.kron(w1.reshape(*w1.shape, *(1 for _ in kernel)), w2)


@pytest.mark.parametrize("kind", ["lora", "rslora", "locon", "loha", "lokr", "lokr_both"])
def test_peft_formulas_give_the_merged_weights_of_every_layer(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str
) -> None:
    base = {name: tensor.numpy() for name, tensor in unet.named_tensors().items()}
    attach(unet, kind).save(tmp_path / "adapter", format="peft")
    found = merged(unet)
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules: dict[str, dict[str, np.ndarray]] = {}
    tensors = tc.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any(key.endswith("alpha") for key in tensors)
    for key, tensor in tensors.items():
        # Several layers' names may be prefixes of the key: the longest is the key's layer.
        layer = max(
            (name for name in config["target_modules"] if key.startswith(f"{PREFIX}{name}.")),
            key=len,
        )
        suffix = key.removeprefix(f"{PREFIX}{layer}.")
        modules.setdefault(layer, {})[suffix] = tensor.numpy()
    assert modules.keys() == set(config["target_modules"])
    for layer, module in modules.items():
        # LoRA's configuration has `lora_alpha`, LoHa's and LoKr's `alpha`. For rslora too the scale
        # is alpha / rank: the file has an alpha that gives the same scale, without `use_rslora`.
        alpha = config.get("lora_alpha", config.get("alpha"))
        scale = config["alpha_pattern"].get(layer, alpha) / config["rank_pattern"].get(
            layer, config["r"]
        )
        weight = base[f"{layer}.weight"]
        expected = weight + scale * delta(module, weight.shape[2:])
        np.testing.assert_allclose(
            found[f"{layer}.weight"], expected, rtol=1e-4, atol=1e-4, err_msg=layer
        )


@pytest.mark.parametrize(("kind", "message"), UNSUPPORTED.items())
def test_adapters_that_peft_does_not_have_are_rejected(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, message: str
) -> None:
    adapter = attach(unet, kind)
    with pytest.raises(tc.ArgumentError, match=message):
        adapter.save(tmp_path / "adapter", format="peft")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("in_header", [True, False], ids=["header", "file"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNSUPPORTED])
def test_folders_load_with_a_configuration_in_a_file_or_in_the_header(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, in_header: bool
) -> None:
    adapter = attach(unet, kind)
    (tmp_path / "adapter").mkdir()  # a folder that exists may be the target
    adapter.save(tmp_path / "adapter", format="peft")
    expected = merged(unet)
    unet.remove_adapter()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    if in_header:
        (tmp_path / "adapter" / "adapter_config.json").unlink()
    else:
        # In peft's own folders, only `adapter_config.json` holds the configuration. So remove it
        # from the header.
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
    tc.save_file(tc.load_file(weights), weights)  # without the configuration in the header
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(tc.ConfigError, match=r"adapter_config\.json is not valid JSON: "):
        unet.load_adapter(tmp_path / "adapter")
