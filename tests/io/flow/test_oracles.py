"""Adapter files of flow models as diffusers and peft read them; needs torch."""

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
# diffusers itself uses a class that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

# LINEAR1: patterns of the layers that Flux's original matrix `linear1` combines. OUTSIDE: patterns
# of the layers outside of the blocks. ENDS: by family, patterns of some layers outside of the
# blocks that the style "outside" adapts.
LINEAR1 = [r"single_transformer_blocks\.\d+\.(attn\.to_.|proj_mlp)"]
OUTSIDE = ["x_embedder", "context_embedder", r"time_text_embed\..*", "norm_out.linear"]
OUTSIDE += ["^proj_out", "all_.*", ".*_stream_modulation.*", r"time_guidance_embed\..*"]
OUTSIDE += ["img_in", "txt_in"]
ENDS = {
    "qwen-image": ["img_in", "^proj_out"],
    "zimage": ["all_x_embedder.2-1"],
    "flux2": [r"time_guidance_embed\..*"],
}
CLASSES = {
    "sd3": ("SD3Transformer2DModel", "StableDiffusion3Pipeline"),
    "flux": ("FluxTransformer2DModel", "FluxPipeline"),
    "chroma": ("ChromaTransformer2DModel", "ChromaPipeline"),
    "zimage": ("ZImageTransformer2DModel", "ZImagePipeline"),
    "flux2": ("Flux2Transformer2DModel", "Flux2KleinPipeline"),
    "qwen-image": ("QwenImageTransformer2DModel", "QwenImagePipeline"),
}


def reference(family: Family) -> Any:
    """diffusers' transformer."""
    return getattr(diffusers, CLASSES[family.name][0]).from_pretrained(family.folder)


def load_lora(family: Family, transformer: Any, path: Path) -> None:
    """Load a file as a user of diffusers does."""
    kind = getattr(diffusers, CLASSES[family.name][1])
    accepted = kind.__init__.__annotations__
    names = (
        "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2",
        "tokenizer_3", "vae", "scheduler",
    )  # fmt: skip
    # The pipeline does not need its other parts to load an adapter of the transformer.
    others = {name: None for name in names if name in accepted}
    pipeline = kind(transformer=transformer, **others)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)


def prediction(family: Family, model: Any) -> np.ndarray:
    """The output of diffusers' transformer for the golden inputs."""
    golden = family.golden_inputs()
    given = {name: torch.from_numpy(tensor.numpy()) for name, tensor in golden.items()}
    with torch.no_grad():
        if family.name == "chroma":
            text_mask = torch.arange(given["txt_ids"].shape[0]) < given.pop("lengths")[:, None]
            image = torch.ones(given["hidden_states"].shape[:2], dtype=torch.bool)
            given["attention_mask"] = torch.cat([text_mask, image], dim=1)
        if family.name == "qwen-image":
            text_mask = torch.arange(len(given.pop("txt_ids"))) < given.pop("lengths")[:, None]
            given["encoder_hidden_states_mask"] = text_mask
            # An image token has the ids (frame, row, column).
            rows, columns = (len(set(given["img_ids"][:, i].tolist())) for i in (1, 2))
            given["img_shapes"] = [[(1, rows, columns)]] * len(text_mask)
            del given["img_ids"]
        if family.name != "zimage":
            return model(**given).sample.numpy()
        # diffusers' Z-Image takes lists: one image and one text without padding for each sample.
        lengths = given["lengths"].long().tolist()
        texts = [t[:n] for t, n in zip(given["encoder_hidden_states"], lengths, strict=True)]
        # Images have a dimension of frames: (channels, 1, height, width).
        images = [image[:, None] for image in given["hidden_states"]]
        predictions = model(images, given["timestep"], texts, return_dict=False)[0]
        return torch.stack(list(predictions))[:, :, 0].numpy()


def assert_same(found: np.ndarray, expected: np.ndarray, base: np.ndarray) -> None:
    """Assert that two predictions agree, and that they differ from that of the base model."""
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["attention", "lora", "rslora", "patterns", "dora"])
def test_diffusers_predicts_the_same_from_the_default_format(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, kind: str
) -> None:
    model = family.load()
    base = family.predict(model)
    attach(model, kind).save(tmp_path / "adapter.safetensors")
    theirs = reference(family)
    load_lora(family, theirs, tmp_path / "adapter.safetensors")
    assert_same(family.predict(model), prediction(family, theirs), base)


# peft warns of layers whose number of inputs is no multiple of the block size.
@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr", "oft_inputs"])
def test_peft_predicts_the_same(
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
    """The adapter is on all layers of the blocks except those in the original matrix `linear1`.

    diffusers splits `linear1` by the widths of the published model, which the tiny model lacks.
    """
    family = FAMILIES["flux"]
    model = family.load()
    base = family.predict(model)
    config = {"target_modules": ["all-linear"], "exclude_modules": LINEAR1 + OUTSIDE}
    attach(model, "lora", **config).save(tmp_path / "adapter.safetensors", format="kohya")
    theirs = reference(family)
    load_lora(family, theirs, tmp_path / "adapter.safetensors")
    assert_same(family.predict(model), prediction(family, theirs), base)


def rename(path: Path, style: str) -> None:
    """Rename the tensors of a file in the default format, in place, to the names of another tool.

    The styles `alpha` and `OneTrainer` also add alphas of 3, which differ from the rank, 4.
    """
    tensors = tc.load_file(path)
    found = {}
    for name, tensor in tensors.items():
        layer, _, end = name.removeprefix("transformer.").rpartition(".lora_")
        flat = layer.replace(".", "_")
        if style == "OneTrainer":
            end = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}[end]
            found[f"lora_transformer_{flat}.{end}"] = tensor
            found[f"lora_transformer_{flat}.alpha"] = tc.tensor(3.0)
        else:
            prefix = {"alpha": "transformer.", "peft": "base_model.model.", "bare": ""}[style]
            found[f"{prefix}{layer}.lora_{end}"] = tensor
            if style == "alpha":
                found[f"{prefix}{layer}.alpha"] = tc.tensor(3.0)
    tc.save_file(found, path)


STYLES = ("default", "alpha", "OneTrainer", "peft", "bare", "comfyui", "kohya", "outside")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("style", STYLES)
def test_verify_says_what_diffusers_really_applies(
    family: Family, attach: Callable[..., tc.AdapterSet], tmp_path: Path, style: str, kind: str
) -> None:
    path = tmp_path / "adapter.safetensors"
    model = family.load()
    base = family.predict(model)
    config: dict[str, Any] = {"exclude_modules": LINEAR1 + OUTSIDE}
    if style == "outside":
        config = {"target_modules": ENDS.get(family.name, ["context_embedder", "^proj_out"])}
    # None is the default format.
    form = {"comfyui": "comfyui", "kohya": "kohya", "outside": "kohya"}.get(style)
    attach(model, kind, **config).save(path, format=form)
    if style in {"alpha", "OneTrainer", "peft", "bare"}:
        if kind == "dora":
            pytest.skip("`rename` knows only the names of LoRA")
        rename(path, style)
        before = family.predict(model)
        model.remove_adapter()
        model.load_adapter(path)
        # The file predicts the same as the adapter before, unless `rename` has added other alphas.
        scaled = style in {"alpha", "OneTrainer"}
        assert scaled != np.allclose(family.predict(model), before, rtol=1e-3, atol=1e-3)
    report = tc.verify_adapter(path, family.name, family.pipeline(tmp_path / "base"))
    claims = {
        "not" if "diffusers" in m.ignored_by else "part" if "diffusers" in m.changed_by else "whole"
        for m in report.modules
    }
    theirs = reference(family)
    try:
        load_lora(family, theirs, path)
    except (ValueError, KeyError, AssertionError, RuntimeError):
        # diffusers rejects the whole file if it has one unknown name.
        assert "not" in claims
        return
    found = prediction(family, theirs)
    as_ours = np.allclose(found, family.predict(model), rtol=1e-4, atol=1e-4)
    as_base = np.allclose(found, base, rtol=1e-4, atol=1e-4)
    # The report says the same of all modules of these files.
    assert claims == {"whole" if as_ours else "not" if as_base else "part"}
