"""Adapter files of SD3.5 and Flux as diffusers and peft read them; needs torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

from .conftest import FAMILIES, Family

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

LINEAR1 = [r"single_transformer_blocks\.\d+\.(attn\.to_.|proj_mlp)"]
OUTSIDE = ["x_embedder", "context_embedder", r"time_text_embed\..*", "norm_out.linear"]
OUTSIDE += ["^proj_out"]
CLASSES = {
    "sd3": ("SD3Transformer2DModel", "StableDiffusion3Pipeline"),
    "flux": ("FluxTransformer2DModel", "FluxPipeline"),
}


def reference(family: Family) -> Any:
    """diffusers' transformer."""
    return getattr(diffusers, CLASSES[family.name][0]).from_pretrained(family.folder)


def load_lora(family: Family, transformer: Any, path: Path) -> None:
    """Load a file as a user of diffusers does."""
    kind = getattr(diffusers, CLASSES[family.name][1])
    names = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2")
    others = dict.fromkeys((*names, "tokenizer_3", "vae", "scheduler"))
    accepted = kind.__init__.__annotations__
    others = {name: None for name in others if name in accepted}
    pipeline = kind(transformer=transformer, **others)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)


def prediction(family: Family, model: Any) -> np.ndarray:
    given = {name: torch.from_numpy(tensor.numpy()) for name, tensor in family.given().items()}
    with torch.no_grad():
        return model(**given).sample.numpy()


def assert_same(found: np.ndarray, expected: np.ndarray, base: np.ndarray) -> None:
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["attention", "lora", "rslora", "patterns", "dora"])
def test_diffusers_computes_the_same_of_the_default_form(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str
) -> None:
    model = family.load()
    base = family.predict(model)
    attach(model, kind).save(tmp_path / "adapter.safetensors")
    theirs = reference(family)
    load_lora(family, theirs, tmp_path / "adapter.safetensors")
    assert_same(family.predict(model), prediction(family, theirs), base)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
def test_peft_computes_the_same(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str
) -> None:
    model = family.load()
    base = family.predict(model)
    attach(model, kind).save(tmp_path / "adapter", format="peft")
    theirs = peft.PeftModel.from_pretrained(reference(family), tmp_path / "adapter").eval()
    assert_same(family.predict(model), prediction(family, theirs), base)


def test_diffusers_reads_kohyas_names_of_flux(
    attach: Callable[..., tc.AdapterSet], tmp_path: Path
) -> None:
    """Its converter expects the published width in `linear1`, which is therefore left out."""
    family = FAMILIES["flux"]
    model = family.load()
    base = family.predict(model)
    config = {"target_modules": ["all-linear"], "exclude_modules": LINEAR1 + OUTSIDE}
    attach(model, "lora", **config).save(tmp_path / "adapter.safetensors", format="kohya")
    theirs = reference(family)
    load_lora(family, theirs, tmp_path / "adapter.safetensors")
    assert_same(family.predict(model), prediction(family, theirs), base)
