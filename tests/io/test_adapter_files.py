"""Files of adapters, written and read with the names of each tool.

The fixture `kind` is each kind of adapter in turn, `config_of` makes its configuration, and
`attach` adds an adapter of a kind, with values that change the output, to a model.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

Attach = Callable[[tc.models.Model, str], tc.AdapterSet]

FORMATS = ("kohya", "comfyui", "diffusers", "peft")
# A layer of the UNet. In the names of original checkpoints, the block `down_blocks.1.attentions.0`
# is `input_blocks.4.1`.
LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def merged(model: tc.models.Model) -> dict[str, np.ndarray]:
    """Merge the adapter into the model's weights and return them."""
    model.merge_adapter()
    return {name: t.numpy() for name, t in model.named_tensors().items()}


def largest_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in found)


@pytest.mark.parametrize("format", FORMATS)
def test_saved_adapters_load_unchanged(
    unet: tc.models.SDXLUNet,
    attach: Attach,
    config_of: Callable[[str], tc.LoraConfig],
    tmp_path: Path,
    kind: str,
    format: str,
) -> None:
    path = tmp_path / "adapter.safetensors"
    adapter = attach(unet, kind)
    # diffusers reads no kind of LyCORIS. Neither diffusers nor peft reads DoRA with a magnitude for
    # each input, or OFT that rotates outputs.
    lycoris = kind.startswith(("loha", "lokr", "oft"))
    is_rejected = (format == "diffusers" and lycoris) or (
        format in {"diffusers", "peft"} and kind in {"dora_input", "oft"}
    )
    if is_rejected:
        with pytest.raises(tc.ArgumentError, match='save with format "kohya"'):
            adapter.save(path, format=format)
        assert not path.exists()
        return
    assert adapter.save(path, format=format) == []  # no layer is untrained
    before = {name: var.numpy() for name, var in adapter.named_parameters().items()}
    expected = merged(unet)
    unet.remove_adapter()
    again = unet.load_adapter(path)
    for name, var in again.named_parameters().items():
        np.testing.assert_allclose(var.numpy(), before[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert again.named_parameters().keys() == before.keys()
    assert largest_error(merged(unet), expected) < 1e-5

    unet.remove_adapter()
    fresh = unet.add_adapter(config_of(kind))
    fresh.load(path)
    assert largest_error(merged(unet), expected) < 1e-5


def test_kohya_is_the_default_for_sdxl_with_alphas_and_metadata(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    path = tmp_path / "my style.safetensors"
    attach(unet, "rslora").save(path, metadata={"ss_output_name": "mine", "x": "y"}, dtype="bf16")
    tensors = tc.load_file(path)
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    assert {name for name in tensors if name.startswith(module)} == {
        f"{module}.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    assert tensors[f"{module}.lora_down.weight"].dtype == "bf16"
    # "rslora" has rank 4 and alpha 6. In the file, alpha / rank is the scale of training:
    # 6 / sqrt(4) = 12 / 4.
    assert tensors[f"{module}.alpha"].item() == pytest.approx(12.0)
    # A safetensors file begins with the length of its header.
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert metadata["ss_base_model_version"] == "sdxl_base_v1-0"
    assert metadata["ss_network_module"] == "networks.lora"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "12")
    assert metadata["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert metadata["modelspec.title"] == "my style"
    assert (metadata["ss_output_name"], metadata["x"]) == ("mine", "y")


def test_kohyas_files_have_one_alpha_and_scale_the_factors(
    unet: tc.models.SDXLUNet,
    attach: Attach,
    config_of: Callable[[str], tc.LoraConfig],
    tmp_path: Path,
) -> None:
    path = tmp_path / "adapter.safetensors"
    adapter = attach(unet, "locon")  # alpha 7 for to_q, 2 for all others
    adapter.save(path, dtype="f16")
    tensors = tc.load_file(path)
    assert {t.item() for name, t in tensors.items() if name.endswith(".alpha")} == {2.0}
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    up = adapter.named_parameters()[f"{LAYER}.lora_B.weight"].numpy()
    found = tensors[f"{module}.lora_up.weight"].numpy()
    # The file has alpha 2 in place of 7, so the factor includes 7 / 2.
    np.testing.assert_array_equal(found, (up * np.float32(3.5)).astype(np.float16))
    unet.remove_adapter()
    again = unet.add_adapter(config_of("locon"))
    again.load(path)  # `load` rejects files whose scales differ from those of the configuration.
    found = again.named_parameters()[f"{LAYER}.lora_B.weight"].numpy()
    np.testing.assert_allclose(found, up, rtol=1e-3, atol=1e-6)


def test_one_file_holds_the_unet_and_both_encoders(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, sdxl: Path
) -> None:
    models = [unet] + [
        tc.models.CLIPTextModel.from_pretrained(sdxl / name, dtype="f32")
        for name in ("text_encoder", "text_encoder_2")
    ]
    adapters = [attach(model, "lora") for model in models]
    for format in ("kohya", "comfyui", "diffusers"):
        path = tmp_path / f"{format}.safetensors"
        assert tc.save_adapters(path, adapters, format=format) == []
        for model, adapter in zip(models, adapters, strict=True):
            model.remove_adapter()
            again = model.load_adapter(path)
            before = adapter.named_parameters()
            assert again.named_parameters().keys() == before.keys()
            for name, var in again.named_parameters().items():
                assert np.array_equal(var.numpy(), before[name].numpy()), name
    keys = tc.load_file(tmp_path / "kohya.safetensors")
    assert "lora_te1_text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight" in keys
    assert "lora_te2_text_model_encoder_layers_1_self_attn_out_proj.alpha" in keys
    with pytest.raises(tc.ArgumentError, match="one part"):
        tc.save_adapters(tmp_path / "x", adapters, format="peft")
    with pytest.raises(tc.ArgumentError, match="no adapters"):
        tc.save_adapters(tmp_path / "x", [])


# For each style of names: the module of `LAYER`, and the names of the down and up factors.
NAMES = {
    "kohya, original names": (
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
        "lora_down.weight",
        "lora_up.weight",
    ),
    "kohya and OneTrainer, diffusers' names": (
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
        "lora_down.weight",
        "lora_up.weight",
    ),
    "old diffusers": (
        f"unet.{LAYER.replace('.to_q', '.processor.to_q')}_lora",
        "down.weight",
        "up.weight",
    ),
    # Written after the names with `processor`, and before those of peft.
    "middle diffusers": (f"unet.{LAYER}", "lora.down.weight", "lora.up.weight"),
    "ComfyUI": (
        "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q",
        "lora_A.weight",
        "lora_B.weight",
    ),
    "peft": (f"base_model.model.{LAYER}", "lora_A.weight", "lora_B.weight"),
    "SimpleTuner": (f"lycoris_{LAYER.replace('.', '_')}", "lora_down.weight", "lora_up.weight"),
}


@pytest.mark.parametrize("alpha", [None, 1.5])
@pytest.mark.parametrize("style", NAMES)
def test_files_of_other_tools_are_read_with_their_scale(
    unet: tc.models.SDXLUNet, tmp_path: Path, style: str, alpha: float | None
) -> None:
    module, down_name, up_name = NAMES[style]
    weight = unet.named_tensors()[f"{LAYER}.weight"].numpy()
    down, up = tc.randn((2, weight.shape[1])), tc.randn((weight.shape[0], 2))
    tensors = {f"{module}.{down_name}": down.to("f16"), f"{module}.{up_name}": up.to("f16")}
    # In old diffusers' files, only the names of factors have the suffix `_lora`.
    alpha_module = module.removesuffix("_lora")
    if alpha is not None:
        tensors[f"{alpha_module}.alpha"] = tc.tensor(alpha, dtype="f16")
    path = tmp_path / "other.safetensors"
    tc.save_file(tensors, path)
    adapter = unet.load_adapter(path)
    assert list(adapter.named_parameters()) == [f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"]
    scale = 1.0 if alpha is None else alpha / 2
    expected = weight + scale * (up.to("f16").to("f32") @ down.to("f16").to("f32")).numpy()
    np.testing.assert_allclose(merged(unet)[f"{LAYER}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_alphas_are_read_from_the_configuration_in_the_header(
    unet: tc.models.SDXLUNet, tmp_path: Path
) -> None:
    weight = unet.named_tensors()[f"{LAYER}.weight"].numpy()
    down, up = tc.randn((2, weight.shape[1])), tc.randn((weight.shape[0], 2))
    tensors = {f"unet.{LAYER}.lora_A.weight": down, f"unet.{LAYER}.lora_B.weight": up}
    config = {"unet.r": 2, "unet.lora_alpha": 4, "unet.alpha_pattern": {LAYER: 5}}
    path = tmp_path / "other.safetensors"
    tc.save_file(tensors, path, metadata={"lora_adapter_metadata": json.dumps(config)})
    unet.load_adapter(path)
    expected = weight + 5 / 2 * (up @ down).numpy()  # alpha / rank
    np.testing.assert_allclose(merged(unet)[f"{LAYER}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_untrained_layers_are_reported(unet: tc.models.SDXLUNet, tmp_path: Path) -> None:
    adapter = unet.add_adapter(tc.LoraConfig(r=2, target_modules=[LAYER, "conv_in"]))
    up = adapter.named_parameters()["conv_in.lora_B.weight"]
    # Initially, the up factor of a LoRA is zero; that of `LAYER` stays so.
    up.set(tc.ones_like(up))
    assert adapter.save(tmp_path / "a.safetensors") == [LAYER]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": (2, 2)}, "not an adapter file"),
        ({"lora_unet_blocks_0_to_x.lora_down.weight": (2, 4)}, "another model"),
        ({"lora_te1_text_model_x.lora_down.weight": (2, 4)}, "no adapter for the unet"),
        # The up factor, `lora_B`, is missing.
        ({"unet.conv_in.lora_A.weight": (2, 4, 3, 3)}, "conv_in"),
        # LoHa in its Tucker form, which is not supported.
        ({"unet.conv_in.hada_t1": (2, 2, 3, 3)}, "Tucker"),
        # `conv_in` has 4 input channels, not 5.
        (
            {
                "unet.conv_in.lora_A.weight": (2, 5, 3, 3),
                "unet.conv_in.lora_B.weight": (32, 2, 1, 1),
            },
            "conv_in",
        ),
        (
            {"unet.conv_in.alpha": (3,), "unet.conv_in.lora_A.weight": (2, 4, 3, 3)},
            "one finite number",
        ),
    ],
)
def test_wrong_files_are_rejected(
    unet: tc.models.SDXLUNet,
    tmp_path: Path,
    tensors: dict[str, tuple[int, ...]],
    message: str,
) -> None:
    path = tmp_path / "wrong.safetensors"
    tc.save_file({name: tc.ones(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(tc.Error, match=message):
        unet.load_adapter(path)
    # The failed call left no adapter: this call would raise an error if there were one.
    unet.add_adapter(tc.LoraConfig(target_modules=["conv_in"]))
