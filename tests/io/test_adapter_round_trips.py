"""Adapter files of other tools hold equal bits after they are read and saved in their format."""

from pathlib import Path

import pytest

import trainable_candle as tc

GOLDEN = Path(__file__).parents[1] / "golden"
RANK = 3
# The modules of sd-scripts' network of SDXL, and the layers of diffusers' models that they adapt.
# https://github.com/kohya-ss/sd-scripts/blob/main/networks/lora.py
KOHYA_UNET = {
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q":
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k":
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k",
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_out_0":
        "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0",
    "lora_unet_input_blocks_4_1_proj_in": "down_blocks.1.attentions.0.proj_in",
    "lora_unet_input_blocks_4_0_in_layers_2": "down_blocks.1.resnets.0.conv1",
    "lora_unet_middle_block_1_transformer_blocks_1_ff_net_0_proj":
        "mid_block.attentions.0.transformer_blocks.1.ff.net.0.proj",
    "lora_unet_output_blocks_2_1_transformer_blocks_0_ff_net_2":
        "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.2",
    "lora_unet_output_blocks_2_0_skip_connection": "up_blocks.0.resnets.2.conv_shortcut",
}  # fmt: skip
KOHYA_TEXT = {
    "text_encoder": {
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj":
            "text_model.encoder.layers.0.self_attn.q_proj",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": "text_model.encoder.layers.0.mlp.fc1",
    },
    "text_encoder_2": {
        "lora_te2_text_model_encoder_layers_1_self_attn_out_proj":
            "text_model.encoder.layers.1.self_attn.out_proj",
        "lora_te2_text_model_encoder_layers_1_mlp_fc2": "text_model.encoder.layers.1.mlp.fc2",
    },
}  # fmt: skip


def factors(shape: tuple[int, ...]) -> tuple[tc.Tensor, tc.Tensor]:
    """Return random factors of a change of a weight, in f32: (down, up)."""
    outputs, inputs, *kernel = shape
    up = tc.randn((outputs, RANK, *(1 for _ in kernel))) * 0.1
    return tc.randn((RANK, inputs, *kernel)) * 0.1, up


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, the shape and the bytes of each tensor in a file, by its name."""
    # Conversion to f32 is exact for f16 and bf16, so equal bytes mean equal values.
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.to("f32").numpy().tobytes())
        for name, tensor in tc.load_file(path).items()
    }


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_file_of_kohyas_scripts_for_sdxl_is_saved_unchanged(dtype: str, tmp_path: Path) -> None:
    """Only the dtype of the alphas changes.

    The scripts write alphas in the dtype of the factors, this library always in f32.
    """
    folder = GOLDEN / "sdxl"
    models = [tc.models.load(folder, subfolder="unet", dtype="f32")]
    models += [tc.models.load(folder, subfolder=name, dtype="f32") for name in KOHYA_TEXT]
    tc.manual_seed(0)
    tensors = {}
    for model, modules in zip(models, [KOHYA_UNET, *KOHYA_TEXT.values()], strict=True):
        weights = model.named_tensors()
        for module, layer in modules.items():
            down, up = factors(tuple(weights[f"{layer}.weight"].shape))
            tensors[f"{module}.lora_down.weight"] = down.to(dtype)
            tensors[f"{module}.lora_up.weight"] = up.to(dtype)
            tensors[f"{module}.alpha"] = tc.tensor(1.5, dtype=dtype)
    path, again = tmp_path / "kohya.safetensors", tmp_path / "again.safetensors"
    tc.save_file(tensors, path)
    adapters = [model.load_adapter(path) for model in models]
    # The result is a list of the layers whose adapter has no effect.
    assert tc.save_adapters(again, adapters, format="kohya", dtype=dtype) == []
    found, expected = contents(again), contents(path)
    alphas = {f"{m}.alpha" for modules in (KOHYA_UNET, *KOHYA_TEXT.values()) for m in modules}
    for name in alphas:
        expected[name] = ("f32", *expected[name][1:])
    assert found == expected


# The modules in ai-toolkit's files for Flux, by the format of this library that has the same names.
# Older versions of ai-toolkit use diffusers' names, newer ones those of the original model. Neither
# writes alphas.
# https://github.com/ostris/ai-toolkit/blob/main/toolkit/network_mixins.py
DOUBLE, SINGLE = "transformer_blocks.1", "single_transformer_blocks.0"
AI_TOOLKIT = {
    "diffusers": [
        f"transformer.{block}.{layer}"
        for block, layers in (
            (DOUBLE, ["attn.to_q", "attn.add_k_proj", "attn.to_out.0", "ff.net.0.proj",
                      "ff_context.net.2", "norm1.linear"]),
            (SINGLE, ["attn.to_v", "proj_mlp", "proj_out", "norm.linear"]),
        )
        for layer in layers
    ],
    "comfyui": [
        f"diffusion_model.{layer}"
        for layer in ("double_blocks.1.img_attn.qkv", "double_blocks.1.txt_attn.proj",
                      "double_blocks.1.img_mlp.0", "double_blocks.1.txt_mod.lin",
                      "single_blocks.0.linear1", "single_blocks.0.linear2")
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("format", AI_TOOLKIT)
def test_a_file_of_ai_toolkit_for_flux_is_saved_unchanged(
    format: str, dtype: str, tmp_path: Path
) -> None:
    model = tc.models.FluxTransformer.from_pretrained(GOLDEN / "flux" / "transformer", dtype="f32")
    original = tmp_path / "original.safetensors"
    tc.models.save_checkpoint(original, {"transformer": model})
    weights = tc.load_file(original) if format == "comfyui" else model.named_tensors()
    prefix = "model.diffusion_model." if format == "comfyui" else ""
    tc.manual_seed(0)
    tensors = {}
    for module in AI_TOOLKIT[format]:
        layer = module.partition(".")[2]
        down, up = factors(tuple(weights[f"{prefix}{layer}.weight"].shape))
        tensors[f"{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"{module}.lora_B.weight"] = up.to(dtype)
    path, again = tmp_path / "ai-toolkit.safetensors", tmp_path / "again.safetensors"
    tc.save_file(tensors, path)
    adapter = model.load_adapter(path)
    assert adapter.save(again, format=format, dtype=dtype) == []
    found, expected = contents(again), contents(path)
    if format == "comfyui":
        # Unlike the original file, this format has alphas. They equal the ranks: the scale is 1.
        alphas = {name: tc.load_file(again)[name].item() for name in found.keys() - expected.keys()}
        assert alphas == {f"{module}.alpha": RANK for module in AI_TOOLKIT[format]}
        found = {name: value for name, value in found.items() if name not in alphas}
    assert found == expected
