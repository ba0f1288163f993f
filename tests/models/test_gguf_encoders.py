"""GGUF files of text encoders and of SDXL's UNet."""

from pathlib import Path

import numpy as np
import pytest
from tests.compressed import decompressed

import trainable_candle as tc
from trainable_candle.export.gguf_file import Entry, write
from trainable_candle.models import CLIPTextModel, SDXLUNet, T5Encoder

from .test_gguf_images import PREFIX, kind_of, write_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
# To get transformers' names, ComfyUI-GGUF replaces these keys in llama.cpp's names by these values,
# in this order.
FROM_LLAMA_CPP = {
    "enc.": "encoder.",
    ".blk.": ".block.",
    "token_embd": "shared",
    "output_norm": "final_layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_norm": "layer.0.layer_norm",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_norm": "layer.1.layer_norm",
}


def to_llama_cpp(name: str) -> str:
    """llama.cpp's name of a tensor, from the name in transformers."""
    for llama_cpp, transformers in reversed(FROM_LLAMA_CPP.items()):
        name = name.replace(transformers, llama_cpp)
    return name


def write_named(
    weights: dict[str, tc.Tensor], path: Path, architecture: str, kind: str
) -> dict[str, tc.Tensor]:
    """Write a GGUF file; the keys of `weights` are the names in it. Return the rounded weights.

    Matrices have the type `kind`, apart from small and unusual ones; see `kind_of`.
    """
    entries, values = [], {}
    for name, tensor in weights.items():
        chosen, wide = kind_of(name, tensor, kind), tensor.to("f32")
        entries.append(Entry(name, tuple(tensor.shape), chosen, lambda wide=wide: wide))
        quantized = chosen.startswith("q")
        values[name] = tc.quantize(wide, chosen).dequantize() if quantized else wide.to(chosen)
    with path.open("wb") as file:
        write(file, {"general.architecture": architecture}, entries)
    return values


def assert_equal(found: dict[str, tc.Tensor], expected: dict[str, tc.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.to("f32").numpy(), name)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_t5_is_read_under_the_names_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    folder = GOLDEN / "t5" / "gated"
    weights = T5Encoder.from_pretrained(folder, dtype="f32").named_tensors()
    path = tmp_path / "t5.gguf"
    stored = write_named({to_llama_cpp(n): t for n, t in weights.items()}, path, "t5encoder", kind)
    config = folder / "config.json"
    # Without a configuration, the loader deduces the sizes from the shapes.
    for config_or_none in (config, None):
        found = T5Encoder.from_pretrained(path, dtype="f32", config=config_or_none)
        assert_equal(found.named_tensors(), {n: stored[to_llama_cpp(n)] for n in weights})
    # A model of the GGUF file computes the same as one of a safetensors file with the same values.
    case = tc.load_file(decompressed(GOLDEN / "t5" / "gated.safetensors"))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes(config.read_bytes())
    tc.save_file(
        {n: stored[to_llama_cpp(n)].to("f32") for n in weights}, plain / "model.safetensors"
    )
    model = T5Encoder.from_pretrained(path, dtype="f32", config=config)
    expected = T5Encoder.from_pretrained(plain, dtype="f32")(case["input_ids"]).numpy()
    np.testing.assert_allclose(model(case["input_ids"]).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_to_llama_cpp_gives_the_names_of_gguf_py() -> None:
    gguf = pytest.importorskip("gguf")
    # Names for up to 4 blocks; the model has 3.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 4)
    weights = T5Encoder.from_pretrained(GOLDEN / "t5" / "gated", dtype="f32").named_tensors()
    for name in weights:
        assert names.get_name(name, try_suffixes=(".weight",)) == to_llama_cpp(name)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_clip_is_read_under_the_names_of_transformers(part: str, tmp_path: Path) -> None:
    folder = GOLDEN / "sdxl" / part
    weights = CLIPTextModel.from_pretrained(folder, dtype="f32").named_tensors()
    path = tmp_path / "clip.gguf"
    stored = write_named(dict(weights), path, "clip", "q8_0")
    model = CLIPTextModel.from_pretrained(path, dtype="f32", config=folder / "config.json")
    assert_equal(model.named_tensors(), stored)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_sdxl_is_read_under_its_original_names(kind: str, tmp_path: Path) -> None:
    """As in files of ComfyUI-GGUF, linear layers are quantized, and convolutions are f16."""
    folder = GOLDEN / "sdxl" / "unet"
    model = SDXLUNet.from_pretrained(folder, dtype="f32")
    original, path = tmp_path / "original.safetensors", tmp_path / "sdxl.gguf"
    tc.models.save_checkpoint(original, {"unet": model})
    # `write_gguf` returns the rounded values under the names in the GGUF file. These lack PREFIX,
    # with which the names in a checkpoint of the whole pipeline begin.
    values = write_gguf(original, path, kind)
    # From here on, `original` has the rounded values, under the names of the original checkpoint.
    tc.save_file({f"{PREFIX}{name}": tensor for name, tensor in values.items()}, original)
    config = folder / "config.json"
    found = SDXLUNet.from_pretrained(path, dtype="f32", config=config)
    plain = SDXLUNet.from_pretrained(original, dtype="f32", config=config)
    assert_equal(found.named_tensors(), plain.named_tensors())
    case = tc.load_file(GOLDEN / "sdxl" / "unet_forward.safetensors")
    added = {name: case[name] for name in ("text_embeds", "time_ids")}
    results = (
        unet(case["sample"], case["timestep"], case["encoder_hidden_states"], **added).numpy()
        for unet in (found, plain)
    )
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
