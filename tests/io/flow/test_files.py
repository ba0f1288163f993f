"""Adapter files of flow models, written and read with the layer names of each tool."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.files import safetensors_metadata

from .conftest import FAMILIES, KINDS, RANK, Family, merged

# The errors of saving, by format and kind of adapter. `KINDS` maps the name of each kind to the
# arguments of its `LoraConfig`: "oft" rotates outputs, "oft_inputs" inputs, and the kinds with
# "attention" in their names adapt only layers of the attention.
CANNOT = {
    # Kohya's names are those of the original matrices. Such a matrix combines queries, keys and
    # values, and in single blocks also the first layer of the MLP.
    ("kohya", "lokr"): "apply to all outputs of the module; save with format \"comfyui\"",
    ("kohya", "dora_input"): "the adapter has one magnitude for each input, which",
    ("kohya", "dora_attention"): "would change the module's layers that have no adapter",
    ("diffusers", "loha"): 'save with format "comfyui"',
    ("diffusers", "lokr"): 'save with format "comfyui"',
    ("diffusers", "oft"): 'save with format "comfyui"',
    ("diffusers", "oft_attention"): 'save with format "comfyui"',
    **{(form, "oft_inputs"): "--oft-side output" for form in ("comfyui", "kohya", "diffusers")},
    ("peft", "oft"): "rotate inputs, and this OFT rotates outputs",
    ("peft", "oft_attention"): "--oft-side input",
    ("diffusers", "dora_input"): "does not support DoRA with a magnitude for each input",
    ("peft", "dora_input"): "does not support DoRA with a magnitude for each input",
}  # fmt: skip


@pytest.mark.parametrize("format", ["diffusers", "comfyui", "kohya", "peft"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapters_load_unchanged(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str, format: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    model = family.load()
    adapter = attach(model, kind)
    message = CANNOT.get((format, kind))
    if format == "kohya" and kind != "oft_inputs" and family.name not in LAYERS:
        # The family's original matrices are those of diffusers: none combines several layers. Then
        # kohya's names cause only one error of `CANNOT`, that of an OFT that rotates inputs.
        message = None
    if message:
        with pytest.raises(tc.ArgumentError, match=message):
            adapter.save(path, format=format)
        assert not path.exists()
        return
    assert adapter.save(path, format=format) == []
    before = {name: var.numpy() for name, var in adapter.named_parameters().items()}
    prediction, expected = family.predict(model), merged(model)
    # This also restores the weights, into which `merged` has merged the adapter.
    model.remove_adapter()
    again = model.load_adapter(path)
    assert again.named_parameters().keys() == before.keys()
    for name, var in again.named_parameters().items():
        np.testing.assert_allclose(var.numpy(), before[name], rtol=1e-5, atol=1e-6, err_msg=name)
    found = merged(model)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)
    # A new adapter of the same configuration has the ranks and alphas of the file, so it can load
    # the file.
    model.remove_adapter()
    fresh = model.add_adapter(tc.LoraConfig(**KINDS[kind]))
    fresh.load(path)
    np.testing.assert_allclose(family.predict(model), prediction, rtol=1e-4, atol=1e-4)


def test_the_factors_in_the_default_format_include_the_scale(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path
) -> None:
    model = family.load()
    # Leave out the layers that ComfyUI does not know by diffusers' names (`native`): with them, the
    # report below would not be good.
    adapter = attach(model, "rslora", exclude_modules=list(family.native))
    adapter.save(tmp_path / "adapter.safetensors")
    tensors = tc.load_file(tmp_path / "adapter.safetensors")
    layer = family.layer
    up = adapter.named_parameters()[f"{layer}.lora_B.weight"].numpy()
    # rsLoRA's scale is alpha 6 divided by the square root of the rank 4.
    found = tensors[f"transformer.{layer}.lora_B.weight"].numpy()
    np.testing.assert_allclose(found, 3 * up, rtol=1e-6)
    assert not any(name.endswith(".alpha") for name in tensors)
    report = tc.verify_adapter(
        tmp_path / "adapter.safetensors", family.name, family.pipeline(tmp_path / "base")
    )
    assert report.good
    assert all(m.scale == 1 for m in report.modules)
    # kohya and peft do not read diffusers' names.
    assert {tool for m in report.modules for tool in m.ignored_by} == {"kohya", "peft"}


def test_verify_lists_the_tools_that_know_the_model(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path
) -> None:
    """A1111 loads adapters of CLIP, a part of SD3.5 and Flux, but not of their transformers."""
    path, base = tmp_path / "adapter.safetensors", family.pipeline(tmp_path / "base")
    attach(family.load(), "attention").save(path)
    tools = ["ComfyUI", "diffusers", "kohya", "peft"]
    assert tc.verify_adapter(path, family.name, base).tools == tools
    if family.name not in {"sd3", "flux"}:
        return
    layer = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    factors = {"A": random_array(RANK, 768), "B": random_array(3072, RANK)}
    clip = {f"{layer}.lora_{name}.weight": tc.tensor(factors[name]) for name in "AB"}
    tc.save_file(tc.load_file(path) | clip, path)
    report = tc.verify_adapter(path, family.name, base)
    assert report.tools == [*tools, "A1111"]
    reasons = {str(m.layer).partition(".")[0]: m.ignored_by["A1111"] for m in report.modules}
    assert reasons == {
        "transformer": "it does not support this model",
        "text_encoder": "it only knows kohya's names",
    }


# `sizes` are those by which the larger models are recognised.
@pytest.mark.parametrize(
    ("name", "sizes", "architecture"),
    [
        ("sd3", {}, "stable-diffusion-3.5-medium"),
        ("sd3", {"num_layers": 38}, "stable-diffusion-3.5-large"),
        ("flux2", {}, "Flux.2-klein-4b"),
        ("flux2", {"num_attention_heads": 32}, "Flux.2-klein-9b"),
    ],
)
def test_metadata_name_the_size_of_the_base(
    tmp_path: Path, name: str, sizes: dict[str, int], architecture: str
) -> None:
    family, folder = FAMILIES[name], tmp_path / "model"
    folder.mkdir()
    config = json.loads((family.folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    family.model_class.from_config(folder / "config.json").save_pretrained(folder)
    adapter = tc.models.load(folder).add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))
    path = tmp_path / "adapter.safetensors"
    adapter.save(path)
    assert safetensors_metadata(path)["modelspec.architecture"] == f"{architecture}/lora"


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Write a file as another tool would."""
    tc.save_file({name: tc.tensor(np.ascontiguousarray(a)) for name, a in arrays.items()}, path)
    return path


def random_array(*shape: int) -> np.ndarray:
    """Return random values, the same in each call with the same shape."""
    return np.random.default_rng(len(shape) + sum(shape)).normal(0, 0.1, shape).astype(np.float32)


# The name of one layer and the suffixes of its two factors, as each tool writes them, by family and
# tool. Files with kohya's suffixes also have an alpha.
BLOCK, FLAT = "transformer_blocks.1.attn.to_out.0", "transformer_blocks_1_attn_to_out_0"
PEFT, KOHYA = ("lora_A", "lora_B"), ("lora_down", "lora_up")
TO_OUT = {
    ("sd3", "sd-scripts"): ("lora_unet_joint_blocks_1_x_block_attn_proj", KOHYA),
    ("sd3", "ai-toolkit"): (f"transformer.{BLOCK}", PEFT),
    ("sd3", "OneTrainer"): (f"lora_transformer_{FLAT}", KOHYA),
    ("sd3", "SimpleTuner"): (f"transformer.{BLOCK}", ("lora.down", "lora.up")),
    ("sd3", "SimpleTuner, LyCORIS"): (f"lycoris_{FLAT}", KOHYA),
    ("chroma", "sd-scripts"): ("lora_unet_single_blocks_1_linear2", KOHYA),
    ("chroma", "ai-toolkit"): ("diffusion_model.single_blocks.1.linear2", PEFT),
    ("chroma", "OneTrainer"): ("lora_transformer_single_transformer_blocks_1_proj_out", KOHYA),
    ("chroma", "SimpleTuner"): ("transformer.single_transformer_blocks.1.proj_out", PEFT),
    ("flux", "sd-scripts"): ("lora_unet_double_blocks_1_img_attn_proj", KOHYA),
    ("flux", "ai-toolkit"): (f"transformer.{BLOCK}", PEFT),
    ("flux", "ai-toolkit, later"): ("diffusion_model.double_blocks.1.img_attn.proj", PEFT),
    ("flux", "OneTrainer"): (f"lora_transformer_{FLAT}", KOHYA),
    ("flux", "SimpleTuner"): (f"transformer.{BLOCK}", ("lora.down", "lora.up")),
    ("flux", "SimpleTuner, LyCORIS"): (f"lycoris_{FLAT}", KOHYA),
    ("flux", "peft"): (f"base_model.model.{BLOCK}", PEFT),
    ("flux", "DiffSynth"): (BLOCK, ("lora_A.default", "lora_B.default")),
    ("flux2", "musubi-tuner"): ("lora_unet_double_blocks_1_img_attn_proj", KOHYA),
    ("flux2", "ai-toolkit"): ("diffusion_model.double_blocks.1.img_attn.proj", PEFT),
    ("flux2", "OneTrainer"): (f"transformer.{BLOCK}", PEFT),
    ("flux2", "SimpleTuner, LyCORIS"): (f"lycoris_{FLAT}", KOHYA),
    ("zimage", "musubi-tuner"): ("lora_unet_layers_1_attention_to_out_0", KOHYA),
    ("zimage", "ComfyUI's own"): ("lora_unet_layers_1_attention_out", KOHYA),
    ("zimage", "ai-toolkit"): ("diffusion_model.layers.1.attention.to_out.0", PEFT),
    ("zimage", "SimpleTuner, LyCORIS"): ("lycoris_layers_1_attention_to_out_0", KOHYA),
    ("zimage", "OneTrainer"): ("transformer.layers.1.attention.to_out.0", KOHYA),
    ("qwen-image", "musubi-tuner"): (f"lora_unet_{FLAT}", KOHYA),
    ("qwen-image", "ai-toolkit"): (f"diffusion_model.{BLOCK}", PEFT),
    ("qwen-image", "OneTrainer"): (f"transformer.{BLOCK}", KOHYA),
    ("qwen-image", "SimpleTuner, LyCORIS"): (f"lycoris_{FLAT}", KOHYA),
    ("qwen-image", "DiffSynth"): (BLOCK, ("lora_A.default", "lora_B.default")),
    ("zimage", "DiffSynth"): ("layers.1.attention.to_out.0", ("lora_A.default", "lora_B.default")),
}


@pytest.mark.parametrize(("name", "tool"), TO_OUT)
def test_names_of_other_tools_are_read(tmp_path: Path, name: str, tool: str) -> None:
    module, (down, up) = TO_OUT[name, tool]
    has_alpha = (down, up) == KOHYA
    model = FAMILIES[name].load()
    # The layer of `TO_OUT` in diffusers' names; in the families that are not listed, it is BLOCK.
    layers = {
        "zimage": "layers.1.attention.to_out.0", "chroma": "single_transformer_blocks.1.proj_out",
    }  # fmt: skip
    weight_name = f"{layers.get(name, BLOCK)}.weight"
    base = model.named_tensors()[weight_name].numpy()
    a, b = random_array(RANK, base.shape[1]), random_array(len(base), RANK)
    arrays = {f"{module}.{down}.weight": a, f"{module}.{up}.weight": b}
    if has_alpha:
        arrays[f"{module}.alpha"] = np.float32(2.0)
    scale = 2.0 / RANK if has_alpha else 1.0
    expected = base + scale * b @ a
    model.load_adapter(save_arrays(tmp_path / "a.safetensors", arrays))
    np.testing.assert_allclose(merged(model)[weight_name], expected, atol=1e-6)


def test_verify_says_which_tools_read_musubis_files_of_z_image(tmp_path: Path) -> None:
    """diffusers reads all layers of these files, and peft none.

    ComfyUI reads only the layers that have the same name in diffusers and in the original model.
    """
    arrays = {}
    # The numbers are the sizes of the tiny model's layers.
    for layer, rows, columns in (("attention_to_q", 32, 32), ("feed_forward_w2", 32, 85)):
        module = f"lora_unet_layers_0_{layer}"
        arrays[f"{module}.lora_down.weight"] = random_array(RANK, columns)
        arrays[f"{module}.lora_up.weight"] = random_array(rows, RANK)
        arrays[f"{module}.alpha"] = np.float32(2.0)
    family = FAMILIES["zimage"]
    path = save_arrays(tmp_path / "a.safetensors", arrays)
    report = tc.verify_adapter(path, "zimage", family.pipeline(tmp_path / "base"))
    found = {m.layer: set(m.ignored_by) | set(m.changed_by) for m in report.modules}
    assert found == {
        "transformer.layers.0.attention.to_q": {"ComfyUI", "peft"},
        "transformer.layers.0.feed_forward.w2": {"peft"},
    }


# By family: layers in diffusers that one original matrix combines, in the order of its rows.
LAYERS = {
    "sd3": [f"transformer_blocks.0.attn2.to_{name}" for name in "qkv"],
    "flux": [
        f"single_transformer_blocks.1.{name}"
        for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ],
    "chroma": [
        f"single_transformer_blocks.1.{name}"
        for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ],
    "zimage": [f"noise_refiner.0.attention.to_{name}" for name in "qkv"],
    "flux2": [f"transformer_blocks.1.attn.add_{name}_proj" for name in "qkv"],
}
# By family: the original matrix that combines these layers.
MODULE = {
    "sd3": "joint_blocks.0.x_block.attn2.qkv",
    "flux": "single_blocks.1.linear1",
    "chroma": "single_blocks.1.linear1",
    "zimage": "noise_refiner.0.attention.qkv",
    "flux2": "double_blocks.1.txt_attn.qkv",
}


@pytest.mark.parametrize("style", ["lora_unet", "diffusion_model"])
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora"])
def test_a_matrix_of_several_layers_is_split(
    family: Family, tmp_path: Path, style: str, kind: str
) -> None:
    """If an original matrix combines layers of diffusers, its adapter is split among them.

    sd-scripts and LyCORIS train one adapter for the whole matrix, so these layers share a factor.
    """
    if family.name not in LAYERS:
        pytest.skip("its original matrices are those of diffusers")
    model = family.load()
    base = {name: tensor.numpy() for name, tensor in model.named_tensors().items()}
    names = [f"{layer}.weight" for layer in LAYERS[family.name]]
    whole = np.concatenate([base[name] for name in names])
    rows, columns = whole.shape
    rank, alpha = 3, 1.5
    flat = f"lora_unet_{MODULE[family.name].replace('.', '_')}"
    module = flat if style == "lora_unet" else f"diffusion_model.{MODULE[family.name]}"
    if kind == "loha":
        values = {
            "hada_w1_a": random_array(rows, rank), "hada_w1_b": random_array(rank, columns),
            "hada_w2_a": random_array(rows, rank), "hada_w2_b": random_array(rank, columns),
        }  # fmt: skip
        change = values["hada_w1_a"] @ values["hada_w1_b"]
        change = change * (values["hada_w2_a"] @ values["hada_w2_b"])
    elif kind == "lokr":
        # Such an adapter can be split if the rows of `lokr_w1` stand for equal shares of the
        # matrix: one for each of queries, keys and values, and in `linear1` four more for the MLP,
        # which has four times as many rows as the queries.
        shares = 7 if len(names) == 4 else 3
        values = {
            "lokr_w1": random_array(shares, 8), "lokr_w2_a": random_array(rows // shares, rank),
            "lokr_w2_b": random_array(rank, columns // 8),
        }  # fmt: skip
        change = np.kron(values["lokr_w1"], values["lokr_w2_a"] @ values["lokr_w2_b"])
    else:
        down, up = random_array(rank, columns), random_array(rows, rank)
        values = {"lora_down.weight": down, "lora_up.weight": up}
        change = up @ down
    expected = whole + alpha / rank * change
    if kind == "dora":
        values["dora_scale"] = 1 + random_array(rows, 1) ** 2
        # Files without this library's mark are read with the formula of DoRA's paper: the norm is
        # that of the changed weight.
        norm = np.linalg.norm(expected, axis=1, keepdims=True)
        expected = expected * values["dora_scale"] / norm
    arrays = {f"{module}.{name}": value for name, value in values.items()}
    arrays[f"{module}.alpha"] = np.float32(alpha)
    path = save_arrays(tmp_path / "a.safetensors", arrays)
    report = tc.verify_adapter(path, family.name, family.pipeline(tmp_path / "base"))
    assert [m.layer for m in report.modules] == [
        f"transformer.{layer}" for layer in sorted(LAYERS[family.name])
    ]
    adapter = model.load_adapter(path)
    found = merged(model)
    np.testing.assert_allclose(np.concatenate([found[name] for name in names]), expected, atol=1e-5)
    if kind == "lora":
        # Layers that share a factor still share it when they are written again: otherwise, the rank
        # in the file would be the sum of the layers' ranks.
        model.unmerge_adapter()
        adapter.save(tmp_path / "again.safetensors", format="kohya")
        again = tc.load_file(tmp_path / "again.safetensors")
        assert again[f"{flat}.lora_down.weight"].shape == (rank, columns)


# The matrix has 3 times 32 rows and 32 columns. The 4 rows of the first LoKr factor are no multiple
# of 3, nor are the 95 rows of the LoRA.
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lokr_w1", (4, 4), "applies to all outputs of a fused module"),
        ("lora_up.weight", (95, 3), "expected rows in 3 equal shares"),
    ],
)
def test_adapters_that_cannot_be_split_are_rejected(
    tmp_path: Path, name: str, shape: tuple[int, int], message: str
) -> None:
    module = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    other = ("lokr_w2", (24, 8)) if name == "lokr_w1" else ("lora_down.weight", (3, 32))
    arrays = {
        f"{module}.{parameter}": random_array(*dims) for parameter, dims in ((name, shape), other)
    }
    path = save_arrays(tmp_path / "a.safetensors", arrays)
    family = FAMILIES["sd3"]
    with pytest.raises(tc.WeightsFormatError, match=message):
        family.load().load_adapter(path)
    report = tc.verify_adapter(path, "sd3", family.pipeline(tmp_path / "base"))
    assert not report.good
    assert all(message in (m.fault or "") for m in report.modules)
