"""Adapter files of flow models in ComfyUI's own loader; needs a checkout of ComfyUI."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError

from .conftest import GOLDEN, KINDS, Family

# For each family, settings of ComfyUI's model that ComfyUI cannot derive from the files of the tiny
# model, because it assumes those of the published model.
UNETS: dict[str, dict[str, Any]] = {
    "sd3": {},
    "flux": {"axes_dim": [4, 6, 6], "num_heads": 2},
    "chroma": {"axes_dim": [2, 2, 4], "num_heads": 1, "n_layers": 2},
    "flux2": {"axes_dim": [4, 4, 4, 4], "num_heads": 2},
    "zimage": {
        "n_heads": 2, "n_kv_heads": 2, "axes_dims": [4, 6, 6], "axes_lens": [256, 64, 64],
        "n_refiner_layers": 1, "z_image_modulation": True, "pad_tokens_multiple": 32,
    },
    "qwen-image": {
        "num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": [2, 2, 4],
    },
}  # fmt: skip
# In ComfyUI, SD3 has as many heads of 64 channels as it has blocks.
SD3 = {
    "num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 2,
    "caption_projection_dim": 128, "dual_attention_layers": [0],
}  # fmt: skip


@pytest.fixture
def pipeline(family: Family, tmp_path: Path) -> Path:
    """A pipeline's folder with a transformer whose sizes are possible in ComfyUI."""
    folder = tmp_path / "pipeline"
    if family.name != "sd3":
        return family.pipeline(folder)
    config = folder / "transformer" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(json.loads((family.folder / "config.json").read_text()) | SD3))
    family.model_class.from_config(config).save_pretrained(config.parent)
    return folder


@pytest.fixture
def load(family: Family, pipeline: Path) -> Callable[[], tc.models.Model]:
    """A function that loads the transformer of the pipeline in f32."""
    return lambda: family.model_class.from_pretrained(pipeline / "transformer", dtype="f32")


@pytest.fixture
def compare(
    comfyui: Any, family: Family, load: Callable[[], tc.models.Model], pipeline: Path,
    record_property: Callable[[str, object], None],
) -> Callable[[Path], tc.AdapterReport]:  # fmt: skip
    """A function that compares ComfyUI with the report on a file and with the merged model."""

    def checkpoint(path: Path, adapter: Path | None) -> Path:
        """Write the transformer, with `adapter` merged into it if given; return the file."""
        model = load()
        if adapter:
            model.load_adapter(adapter)
            model.merge_adapter()
        tc.models.save_checkpoint(path.with_suffix(".safetensors"), {"transformer": model})
        return path.with_suffix(".safetensors")

    def compare(path: Path) -> tc.AdapterReport:
        report = tc.verify_adapter(path, family.name, pipeline)
        error = comfyui.check(path, report, {"unet": UNETS[family.name]}, checkpoint)
        record_property("error", error)
        record_property("ignored", sum("ComfyUI" in m.ignored_by for m in report.modules))
        record_property("changed", sum("ComfyUI" in m.changed_by for m in report.modules))
        record_property("modules", len(report.modules))
        return report

    return compare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [None, "diffusers", "comfyui", "kohya", "peft"])
def test_comfyui_loads_what_verify_says(
    family: Family, attach: Callable[..., tc.AdapterSet], load: Callable[[], tc.models.Model],
    compare: Callable[[Path], tc.AdapterReport], tmp_path: Path, kind: str, form: str | None,
) -> None:  # fmt: skip
    path = tmp_path / "adapter.safetensors"
    # The default format (None) has diffusers' names, by which ComfyUI does not know the layers of
    # `family.native`. It is tested without these layers; the format diffusers is tested with them.
    exclude = [] if form else list(family.native)
    adapter = attach(load(), kind, exclude_modules=exclude)
    path = tmp_path / "adapter" if form == "peft" else path
    try:
        adapter.save(path, format=form)
    except ArgumentError as error:
        pytest.skip(f"the format cannot represent it: {error}")
    report = compare(path)
    if form == "comfyui":
        assert report.good


# The name that each tool gives to a layer. `flat` is the layer's name with underscores for dots.
STYLES = {
    "diffusers": "transformer.{layer}",
    "OneTrainer": "lora_transformer_{flat}",
    "LyCORIS": "lycoris_{flat}",
    "musubi-tuner": "lora_unet_{flat}",
    "ai-toolkit": "diffusion_model.{layer}",
    "DiffSynth": "{layer}",
    "peft": "base_model.model.{layer}",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.usefixtures("family")
def test_comfyui_knows_the_names_that_verify_says(
    attach: Callable[..., tc.AdapterSet], load: Callable[[], tc.models.Model],
    compare: Callable[[Path], tc.AdapterReport], tmp_path: Path, style: str,
) -> None:  # fmt: skip
    path = tmp_path / "adapter.safetensors"
    attach(load(), "lora").save(path, format="diffusers")
    # Tools that write underscores for dots also use kohya's names of factors, and store an alpha.
    has_alpha = "flat" in STYLES[style]
    ends = {"A": "lora_down", "B": "lora_up"} if has_alpha else {"A": "lora_A", "B": "lora_B"}
    found = {}
    for key, tensor in tc.load_file(path).items():
        layer, _, end = key.removeprefix("transformer.").rpartition(".lora_")  # end: "A.weight"
        module = STYLES[style].format(layer=layer, flat=layer.replace(".", "_"))
        found[f"{module}.{ends[end[0]]}.weight"] = tensor
        if has_alpha:
            found[f"{module}.alpha"] = tc.tensor(3.0)  # any number but the rank
    tc.save_file(found, path)
    compare(path)


def published(file: str) -> dict[str, list[int]]:
    """The shapes of the parameters of a published model by name."""
    found = {}
    # A `*` in a name stands for each of the `numbers`, those of the blocks.
    for name, shape, numbers in json.loads((GOLDEN / "full_size" / f"{file}.json").read_text()):
        for number in numbers or [0]:
            found[name.replace("*", str(number))] = shape
    return found


# For each family, the file with the shapes of a published model under diffusers' names, and the
# parameters, under ComfyUI's own names, by which ComfyUI recognizes the model. The latter are empty
# if ComfyUI recognizes the model by diffusers' names, which it converts to its own.
PUBLISHED: dict[str, tuple[str, dict[str, list[int]]]] = {
    "sd3": ("sd35_medium", {}),
    "flux": ("flux_dev", {}),
    "chroma": (
        "chroma",
        {"distilled_guidance_layer.norms.0.scale": [5120], "img_in.weight": [3072, 64],
         "txt_in.weight": [3072, 4096]},
    ),
    "flux2": (
        "flux2_klein_4b",
        {"double_stream_modulation_img.lin.weight": [18432, 3072], "img_in.weight": [3072, 128],
         "txt_in.weight": [3072, 7680]},
    ),
    "zimage": ("zimage", {}),
    "qwen-image": ("qwen_image", {}),
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_comfyui_knows_the_layers_of_the_published_model(
    family: Family, comfyui: Any, tmp_path: Path, style: str
) -> None:
    # `marks` are the parameters by which ComfyUI recognizes the model, if it converts no names.
    file, marks = PUBLISHED[family.name]
    shapes = published(file)
    if family.name == "chroma":
        # The file has only the parameters that Flux.1 lacks.
        not_in_chroma = re.compile(r"norm\.linear|norm1|time_text_embed|norm_out")
        flux = published("flux_dev")
        shapes |= {name: shape for name, shape in flux.items() if not not_in_chroma.search(name)}
    given = dict(marks or shapes)
    if marks:
        # ComfyUI counts the blocks by their original names, such as that of the norm of the keys.
        for name in shapes:
            if match := re.match(r"(single_)?transformer_blocks\.(\d+)\.", name):
                norm = "single_blocks.{}.norm" if match[1] else "double_blocks.{}.img_attn.norm"
                given[f"{norm.format(match[2])}.key_norm.scale"] = [128]  # the width of a head
    # The shape of each layer's weight by the name that ComfyUI knows in adapter files.
    known = comfyui.ask({"shapes": given})
    weights = {name: shape for name, shape in shapes.items() if name.endswith(".weight")}
    layers = {
        name.removesuffix(".weight"): shape for name, shape in weights.items() if len(shape) == 2
    }
    # The adapter file, and the layers by their names in it. ComfyUI reads kohya's names of factors
    # under every name of a layer.
    tensors, names = {}, {}
    for layer, (rows, columns) in layers.items():
        name = STYLES[style].format(layer=layer, flat=layer.replace(".", "_"))
        names[name] = layer
        tensors[f"{name}.lora_down.weight"] = tc.ones((1, columns))
        tensors[f"{name}.lora_up.weight"] = tc.ones((rows, 1))
    tc.save_file(tensors, tmp_path / "adapter.safetensors")
    report = tc.verify_adapter(tmp_path / "adapter.safetensors", family.name)
    for module in report.modules:
        knows = module.layer is not None and "ComfyUI" not in module.ignored_by
        assert knows == (module.module in known), module.module
        if knows:
            assert known[module.module] == list(layers[names[module.module]]), module.module
