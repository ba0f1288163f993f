"""Adapter files that this library writes, as diffusers, peft and ComfyUI read them.

The model is a tiny SDXL. `conftest.py` has the fixtures: `unet`, `attach` (which adds an adapter of
a kind and gives it random values) and `kind` (each kind in turn). The kind `locon` gives some
layers another rank or alpha; in `locon_uniform`, all layers have the same.

The tests with diffusers or peft need torch, diffusers, peft, transformers and safetensors, and are
skipped without them. The test with ComfyUI is skipped unless the environment variable COMFYUI names
the folder of a checkout; it also needs ComfyUI's requirements.
"""

import logging
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


def inputs() -> dict[str, tc.Tensor]:
    golden = tc.load_file(SDXL / "unet_forward.safetensors")
    return {name: golden[name] for name in golden if name != "output"}


def predictions(unet: tc.models.SDXLUNet, reference: Any) -> tuple[Floats, Floats]:
    """Return the predictions of our UNet and of `reference`, a UNet of diffusers or peft.

    Assert that the adapter changes the prediction of `reference`.
    """
    torch = pytest.importorskip("torch")
    given = {name: torch.from_numpy(tensor.numpy()) for name, tensor in inputs().items()}
    with torch.no_grad():
        expected = reference(
            given["sample"],
            given["timestep"],
            given["encoder_hidden_states"],
            added_cond_kwargs={"text_embeds": given["text_embeds"], "time_ids": given["time_ids"]},
        ).sample.numpy()
    without_adapter = tc.load_file(SDXL / "unet_forward.safetensors")["output"].numpy()
    assert np.abs(expected - without_adapter).max() > 0.1
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
def test_diffusers_predicts_the_same_with_a_saved_adapter(
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


def test_verify_says_that_diffusers_leaves_out_the_magnitudes_of_kohya_files(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path
) -> None:
    path = tmp_path / "adapter.safetensors"
    attach(unet, "dora").save(path, format="kohya")
    report = tc.verify_adapter(path, weights=SDXL)
    # `changed_by`: the tools that apply a module, but not as it was trained.
    assert all("diffusers" in module.changed_by for module in report.modules)


@pytest.mark.parametrize(
    ("kind", "format"), [("lora", "diffusers"), ("dora", "diffusers"), ("lora", "kohya")]
)
def test_diffusers_applies_the_adapters_of_both_encoders(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, format: str
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
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


@pytest.mark.parametrize(
    "in_one_call", [True, False], ids=["the folder", "configuration, then tensors"]
)
# `lokr_both` is left out: if LoKr's first factor is the larger one, LyCORIS swaps the factors, but
# peft does not.
@pytest.mark.parametrize("kind", ["lora", "locon", "dora", "loha", "lokr"])
def test_peft_predicts_the_same(
    unet: tc.models.SDXLUNet, attach: Attach, tmp_path: Path, kind: str, in_one_call: bool
) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    attach(unet, kind).save(tmp_path / "adapter", format="peft")
    reference = diffusers.UNet2DConditionModel.from_pretrained(
        SDXL / "unet", torch_dtype=torch.float32
    )
    if in_one_call:
        model = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    else:
        config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        model = peft.get_peft_model(reference, config)
        tensors = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert peft.set_peft_model_state_dict(model, tensors).unexpected_keys == []
    model.eval()
    found, expected = predictions(unet, model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


# What `comfyui_worker.py` must know about the tiny model. `clip` is the number of layers of a text
# encoder. `model_channels` is 32, although the UNet's `config.json` says 8, because ComfyUI's group
# normalizations have 32 groups; before `comfyui_worker.py` loads the file, it gives the parameters
# of ComfyUI's layers the shapes that they have in the file.
_COMFYUI = {
    "model": "SDXL",
    "unet": {"model_channels": 32, "num_head_channels": 8},
    "clip": 3,
}
_PARTS = {
    "unet": tc.models.SDXLUNet,
    "text_encoder": tc.models.CLIPTextModel,
    "text_encoder_2": tc.models.CLIPTextModel,
}


@pytest.mark.parametrize("format", ["kohya", "comfyui", "diffusers", "peft"])
def test_comfyui_loads_what_verify_says(
    comfyui: Any, attach: Attach, tmp_path: Path, kind: str, format: str,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    def load_parts() -> dict[str, tc.models.Model]:
        return {
            name: part.from_pretrained(SDXL / name, dtype="f32") for name, part in _PARTS.items()
        }

    def checkpoint(path: Path, adapter: Path | None) -> Path:
        """Write the parts, with `adapter` merged into them if given; return the file's path."""
        models = load_parts()
        if adapter:
            modules = tc.verify_adapter(adapter, weights=SDXL).modules
            # The name of a layer begins with that of its part.
            for name in {str(module.layer).partition(".")[0] for module in modules}:
                models[name].load_adapter(adapter)
                models[name].merge_adapter()
        tc.models.save_checkpoint(path.with_suffix(".safetensors"), models)
        return path.with_suffix(".safetensors")

    path = tmp_path / ("adapter" if format == "peft" else "adapter.safetensors")
    # peft's folder holds the adapter of only one part; here, the UNet.
    models = list(load_parts().values())[: 1 if format == "peft" else None]
    try:
        tc.save_adapters(path, [attach(model, kind) for model in models], format=format)
    except tc.ArgumentError as error:
        pytest.skip(f"{format} cannot represent {kind}: {error}")
    report = tc.verify_adapter(path, weights=SDXL)
    # `good` asks whether ComfyUI applies every module as it was trained. Of files of SDXL in the
    # format "diffusers", it ignores the UNet's attention; of the format "peft", it ignores all.
    assert report.good == (format in {"kohya", "comfyui"})
    record_property("error", comfyui.check(path, report, _COMFYUI, checkpoint))
    record_property("ignored", sum("ComfyUI" in m.ignored_by for m in report.modules))
    record_property("changed", sum("ComfyUI" in m.changed_by for m in report.modules))
    record_property("modules", len(report.modules))


logging.getLogger("diffusers").setLevel(logging.ERROR)
