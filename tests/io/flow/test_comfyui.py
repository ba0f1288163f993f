"""Adapter files of flow models as ComfyUI applies them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc

from . import comfyui
from .conftest import KINDS, Family, merged

Slices = dict[str, comfyui.Slice]


@pytest.fixture
def slices(family: Family) -> Slices:
    """The rows of ComfyUI's matrices, by the name of the family's layer in diffusers."""
    config = json.loads((family.folder / "config.json").read_text())
    if family.name == "sd3":
        return comfyui.sd3_slices(config["num_layers"], len(config["dual_attention_layers"]))
    if family.name == "qwen-image":
        weights = family.load().named_tensors()
        layers = [name.removesuffix(".weight") for name, w in weights.items() if w.ndim == 2]
        return {layer: comfyui.Slice(layer) for layer in layers}
    if family.name == "zimage":
        return comfyui.z_image_slices(config["n_layers"], config["n_refiner_layers"])
    slices_of = comfyui.flux2_slices if family.name == "flux2" else comfyui.flux_slices
    found = slices_of(config["num_layers"], config["num_single_layers"])
    if family.name == "chroma":
        found = comfyui.without_modulation(found, config["approximator_layers"])
    return found


# The default format, None, is diffusers' for these models. Kinds that a format cannot represent or
# ComfyUI does not apply are left out, such as an OFT that rotates inputs, which only peft reads.
@pytest.mark.parametrize(
    ("format", "kind"),
    [("comfyui", kind) for kind in KINDS if kind != "oft_inputs"]
    + [(None, kind) for kind in ("attention", "lora", "rslora", "patterns")]
    + [("kohya", kind) for kind in ("attention", "lora", "patterns", "dora", "loha", "oft")],
)
def test_comfyui_merges_the_same_weights(
    family: Family, slices: Slices, attach: Callable[..., tc.AdapterSet], tmp_path: Path,
    kind: str, format: str | None,
) -> None:  # fmt: skip
    model = family.load()
    base = {name: tensor.numpy() for name, tensor in model.named_tensors().items()}
    matrices = comfyui.originals(base, slices)
    linear = {name for name, value in base.items() if name.endswith(".weight") and value.ndim == 2}
    assert linear <= {f"{layer}.weight" for layer in slices}
    path = tmp_path / "adapter.safetensors"
    # The default format has diffusers' names, by which ComfyUI does not know the layers in
    # `family.native`.
    exclude = [] if format else list(family.native)
    attach(model, kind, exclude_modules=exclude).save(path, format=format)
    tensors = {name: tensor.numpy() for name, tensor in tc.load_file(path).items()}
    found = comfyui.applied(tensors, matrices, slices)
    expected = comfyui.originals(merged(model), slices)
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, atol=1e-5 * scale, err_msg=name)
    assert any(np.abs(expected[name] - matrices[name]).max() > 1e-3 for name in matrices)
    report = tc.verify_adapter(path, family.name, family.pipeline(tmp_path / "base"))
    assert report.good, {(m.module, m.fault) for m in report.modules if m.fault}


@pytest.mark.parametrize("kind", ["dora"])
def test_what_comfyui_ignores_is_reported(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    attach(family.load(), kind, exclude_modules=list(family.native)).save(path)
    report = tc.verify_adapter(path, family.name, family.pipeline(tmp_path / "base"))
    assert not report.good
    reasons = {m.changed_by.get("ComfyUI") for m in report.modules}
    assert reasons == {"it only knows DoRA's magnitude as dora_scale"}
    assert not any("diffusers" in {**m.changed_by, **m.ignored_by} for m in report.modules)


def test_layers_that_comfyui_knows_by_other_names_are_reported(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path
) -> None:
    if not family.native:
        return
    path, base = tmp_path / "adapter.safetensors", family.pipeline(tmp_path / "base")
    # None: ComfyUI does not ignore the layer.
    for form, ignored in (("diffusers", {"it does not know this key"}), ("comfyui", {None})):
        adapter = attach(family.load(), "lora", target_modules=list(family.native))
        adapter.save(path, format=form)
        report = tc.verify_adapter(path, family.name, base)
        assert {m.ignored_by.get("ComfyUI") for m in report.modules} == ignored
