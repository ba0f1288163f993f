"""Files that this library writes, as diffusers and ComfyUI read them.

Tests of diffusers need torch, diffusers and peft. Tests of ComfyUI need a checkout whose folder is
in the environment variable COMFYUI. Tests whose tools are missing are skipped.
"""

import gzip
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc

SDXL = Path(__file__).parents[1] / "golden" / "sdxl"
Floats = npt.NDArray[np.float32]
Attach = Callable[[tc.models.Model, str], tc.AdapterSet]

_COMFYUI = os.environ.get("COMFYUI")


def inputs() -> dict[str, tc.Tensor]:
    golden = tc.load_file(SDXL / "unet_forward.safetensors")
    return {name: golden[name] for name in golden if name != "output"}


def predictions(unet: tc.models.SDXLUNet, reference: Any) -> tuple[Floats, Floats]:
    """Our prediction and diffusers' prediction for the golden inputs.

    Asserts that diffusers' prediction differs from the output without an adapter.
    """
    torch = pytest.importorskip("torch")
    x = {name: torch.from_numpy(tensor.numpy()) for name, tensor in inputs().items()}
    with torch.no_grad():
        expected = reference(
            x["sample"],
            x["timestep"],
            x["encoder_hidden_states"],
            added_cond_kwargs={"text_embeds": x["text_embeds"], "time_ids": x["time_ids"]},
        ).sample.numpy()
    base = tc.load_file(SDXL / "unet_forward.safetensors")["output"].numpy()
    assert np.abs(expected - base).max() > 0.1
    return unet(**inputs()).numpy(), expected


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("lora", "kohya"),
        ("rslora", "kohya"),
        ("locon", "kohya"),
        ("locon_uniform", "kohya"),
        ("lora", "diffusers"),
        ("rslora", "diffusers"),
        ("locon", "diffusers"),
    ],
)
def test_diffusers_predicts_the_same(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, format: str
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    path = tmp_path / "adapter.safetensors"
    attach(unet, kind).save(path, format=format)
    reference = diffusers.UNet2DConditionModel.from_pretrained(
        SDXL / "unet", torch_dtype=torch.float32
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=None,
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=reference,
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    found, expected = predictions(unet, reference)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("format", ["diffusers", "kohya"])
def test_diffusers_applies_the_adapters_of_both_encoders(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, format: str
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    if (kind, format) == ("dora", "kohya"):
        # diffusers leaves the magnitude out, and `verify_adapter` reports that.
        adapter = attach(unet, kind)
        adapter.save(tmp_path / "adapter.safetensors", format=format)
        report = tc.verify_adapter(tmp_path / "adapter.safetensors", weights=SDXL)
        assert all("diffusers" in module.changed_by for module in report.modules)
        return
    ours = {
        name: tc.models.CLIPTextModel.from_pretrained(SDXL / name, dtype="f32")
        for name in ("text_encoder", "text_encoder_2")
    }
    adapters = [attach(model, kind) for model in (unet, *ours.values())]
    path = tmp_path / "adapter.safetensors"
    tc.save_adapters(path, adapters, format=format)
    report = tc.verify_adapter(path, weights=SDXL)
    assert not any("diffusers" in module.ignored_by for module in report.modules)
    theirs = {
        "text_encoder": transformers.CLIPTextModel.from_pretrained(SDXL / "text_encoder"),
        "text_encoder_2": transformers.CLIPTextModelWithProjection.from_pretrained(
            SDXL / "text_encoder_2"
        ),
    }
    theirs = {name: model.to(torch.float32) for name, model in theirs.items()}
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=None,
        **theirs,
        tokenizer=None,
        tokenizer_2=None,
        unet=diffusers.UNet2DConditionModel.from_pretrained(SDXL / "unet"),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    ids = tc.load_file(SDXL / "text_encoder_forward.safetensors")["input_ids"]
    for name, model in ours.items():
        with torch.no_grad():
            expected = theirs[name](torch.from_numpy(ids.numpy()), output_hidden_states=True)
        np.testing.assert_allclose(
            model(ids).penultimate.numpy(),
            expected.hidden_states[-2].numpy(),
            rtol=1e-4,
            atol=1e-4,
            err_msg=name,
        )


@pytest.mark.parametrize("own_configuration", [True, False])
# `lokr_both` is left out: if LoKr's first factor is the larger one, LyCORIS swaps the factors, but
# peft does not.
@pytest.mark.parametrize("kind", ["lora", "locon", "dora", "loha", "lokr"])
def test_peft_predicts_the_same(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, own_configuration: bool
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    attach(unet, kind).save(tmp_path / "adapter", format="peft")
    reference = diffusers.UNet2DConditionModel.from_pretrained(
        SDXL / "unet", torch_dtype=torch.float32
    )
    if own_configuration:
        model = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    else:
        config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        model = peft.get_peft_model(reference, config)
        tensors = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert peft.set_peft_model_state_dict(model, tensors).unexpected_keys == []
    model.eval()
    found, expected = predictions(unet, model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


_COMFYUI_CHECK = """
import json, logging, sys, types
folder, lora_path, base_path, output = sys.argv[1:]
sys.argv = ["check", "--cpu"]
sys.path.insert(0, folder)
import comfy.options
comfy.options.enable_args_parsing()
class Classes(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
# The loader only compares classes. An import of the real ones would need the code of all models.
sys.modules["comfy.model_base"] = Classes("comfy.model_base")
import comfy
comfy.model_base = sys.modules["comfy.model_base"]
import comfy.lora, comfy.lora_convert
from safetensors.torch import load_file, save_file
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
base, lora = load_file(base_path), comfy.lora_convert.convert_lora(load_file(lora_path))
config = json.load(open(base_path + ".json"))
model = types.SimpleNamespace(
    state_dict=lambda: base, model_config=types.SimpleNamespace(unet_config=config)
)
keys = comfy.lora.model_lora_keys_unet(model, {})
keys = comfy.lora.model_lora_keys_clip(model, keys)
patches = comfy.lora.load_lora(lora, keys)
save_file(
    {
        key: comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], base[key].clone(), key)
        .contiguous()
        for key, patch in patches.items()
    },
    output,
)
"""

# The configuration that ComfyUI deduces from the tiny UNet's checkpoint.
_UNET_CONFIG = {
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 2],
    "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "transformer_depth_middle": 2,
}


@pytest.mark.skipif(not _COMFYUI, reason="COMFYUI does not name a checkout")
@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_comfyui_applies_every_key_and_merges_the_same(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, format: str
) -> None:
    models = {
        "unet": unet,
        "text_encoder": tc.models.CLIPTextModel.from_pretrained(SDXL / "text_encoder", dtype="f32"),
        "text_encoder_2": tc.models.CLIPTextModel.from_pretrained(
            SDXL / "text_encoder_2", dtype="f32"
        ),
    }
    names = comfyui_names(models)
    plain = {
        key: models[part].named_tensors()[name].contiguous() for key, (part, name) in names.items()
    }
    tc.save_file(plain, tmp_path / "base.safetensors")
    (tmp_path / "base.safetensors.json").write_text(json.dumps(_UNET_CONFIG))
    adapters = [attach(model, kind) for model in models.values()]
    tc.save_adapters(tmp_path / "lora.safetensors", adapters, format=format)
    report = tc.verify_adapter(tmp_path / "lora.safetensors", weights=SDXL)
    assert report.good, [m.module for m in report.modules if m.fault or m.ignored_by]
    files = [
        tmp_path / name for name in ("lora.safetensors", "base.safetensors", "out.safetensors")
    ]
    done = subprocess.run(
        [sys.executable, "-c", _COMFYUI_CHECK, str(_COMFYUI), *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "not loaded" not in done.stderr
    assert "ERROR" not in done.stderr
    found = tc.load_file(files[2])
    assert len(found) == len(report.modules)
    for model in models.values():
        model.merge_adapter()
    for key, tensor in found.items():
        part, name = names[key]
        ours = models[part].named_tensors()[name].numpy()
        np.testing.assert_allclose(tensor.numpy(), ours, rtol=2e-5, atol=2e-5, err_msg=key)
        assert np.abs(ours - plain[key].numpy()).max() > 1e-3


def comfyui_names(models: dict[str, tc.models.Model]) -> dict[str, tuple[str, str]]:
    """For each parameter's name in ComfyUI, the model that has it and its name in this library.

    In ComfyUI, the UNet's parameters have the names of the original checkpoint. The parameters of
    the text encoders have transformers' names.
    """
    names = {}
    for key, sources in json.loads(
        gzip.decompress((SDXL / "original_names.json.gz").read_bytes())
    ).items():
        part, name, _ = sources[0]
        if part == "unet":
            names[key.removeprefix("model.")] = (part, name)
    for part, prefix in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g")):
        names |= {
            f"{prefix}.transformer.{name}": (part, name) for name in models[part].named_tensors()
        }
    return names


logging.getLogger("diffusers").setLevel(logging.ERROR)
