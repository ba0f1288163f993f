"""Transformers of image models in files of ComfyUI-GGUF, with the names of original checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compressed import model_folder

import trainable_candle as tc
from trainable_candle.export.gguf_file import Entry, write
from trainable_candle.models import (
    ChromaTransformer,
    Flux2Transformer,
    FluxTransformer,
    Model,
    QwenImageTransformer,
    SD3Transformer,
    ZImageTransformer,
)

GOLDEN = Path(__file__).parents[1] / "golden"
IDS = ("img_ids", "txt_ids")
# The class of each family's transformer, and its inputs besides latents, text and time.
FAMILIES: dict[str, tuple[type[Model], tuple[str, ...]]] = {
    "flux": (FluxTransformer, ("pooled_projections", *IDS, "guidance")),
    "sd3": (SD3Transformer, ("pooled_projections",)),
    "chroma": (ChromaTransformer, (*IDS, "lengths")),
    "zimage": (ZImageTransformer, ("lengths",)),
    "flux2": (Flux2Transformer, IDS),
    "qwen-image": (QwenImageTransformer, (*IDS, "lengths")),
}
PREFIX = "model.diffusion_model."


def kind_of(name: str, tensor: tc.Tensor, kind: str) -> str:
    """The type in which a file of the type `kind` stores a tensor.

    Vectors and tensors of at most 1024 elements are f32. Position embeddings, tensors that are
    not matrices, and matrices whose row length is not a multiple of 32 are f16. All others are of
    type `kind`.
    """
    if tensor.ndim == 1 or tensor.numel() <= 1024:
        return "f32"
    if tensor.ndim != 2 or tensor.shape[1] % 32 or "pos_embed" in name:
        return "f16"
    return kind


def write_gguf(original: Path, path: Path, kind: str) -> dict[str, tc.Tensor]:
    """Write the tensors of an original checkpoint to a GGUF file, without `PREFIX` in their names.

    Return the stored values by these names.
    """
    tensors = {name.removeprefix(PREFIX): t for name, t in tc.load_file(original).items()}
    entries, values = [], {}
    for name, tensor in tensors.items():
        chosen = kind_of(name, tensor, kind)
        wide = tensor.to("f32")
        # The default binds this tensor: the function is called after the loop, by `write`.
        entries.append(Entry(name, tuple(tensor.shape), chosen, lambda wide=wide: wide))
        quantized = chosen.startswith("q")
        values[name] = tc.quantize(wide, chosen).dequantize() if quantized else wide.to(chosen)
    with path.open("wb") as file:
        write(file, {"general.architecture": path.stem, "general.quantization_version": 2}, entries)
    return values


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_predicts_and_trains_like_its_values(family: str, kind: str, tmp_path: Path) -> None:
    folder = model_folder(GOLDEN / family / "transformer")
    transformer, inputs = FAMILIES[family]
    model = transformer.from_pretrained(folder, dtype="f32")
    original = tmp_path / "original.safetensors"
    tc.models.save_checkpoint(original, {"transformer": model})
    values = write_gguf(original, tmp_path / f"{family}.gguf", kind)
    # From here on, the original checkpoint has the values that the GGUF file stores.
    tc.save_file(values, original)
    config = folder / "config.json"
    found = transformer.from_pretrained(tmp_path / f"{family}.gguf", dtype="f32", config=config)
    plain = transformer.from_pretrained(original, dtype="f32", config=config)
    for name, tensor in plain.named_tensors().items():
        np.testing.assert_array_equal(found.named_tensors()[name].numpy(), tensor.numpy(), name)
    case = tc.load_file(GOLDEN / family / "transformer_forward.safetensors")
    names = ("hidden_states", "encoder_hidden_states", "timestep", *inputs)
    given = {name: case[name] for name in names}
    for checkpointing in (None, "full"):
        results = []
        for each in (found, plain):
            if checkpointing:
                each.enable_gradient_checkpointing(checkpointing)
            adapter = each.add_adapter(tc.LoraConfig(r=4, target_modules=["all-linear"]))
            tc.manual_seed(0)
            for var in adapter.parameters():
                var.set(tc.randn(var.shape) * 0.05)
            loss = (each(**given) ** 2).mean()
            gradients = tc.grad(loss, adapter.parameters())
            # The layers of Qwen-Image's last block that apply only to the text have no gradients.
            not_none = [gradient.numpy() for gradient in gradients if gradient is not None]
            assert not_none
            results.append([loss.numpy(), *not_none])
            each.remove_adapter()
        for from_gguf, from_values in zip(*results, strict=True):
            np.testing.assert_allclose(from_gguf, from_values, rtol=1e-4, atol=1e-6)


# Changes of the golden configurations that make the row length of every matrix in the transformer
# blocks a multiple of 256: a K-quant stores 256 elements together. Both models are 256 wide.
WIDE: dict[str, dict[str, Any]] = {
    "flux": {
        "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56], "joint_attention_dim": 256,
        "pooled_projection_dim": 256, "num_layers": 1, "num_single_layers": 1,
    },
    "sd3": {
        "attention_head_dim": 128, "num_attention_heads": 2, "caption_projection_dim": 256,
        "joint_attention_dim": 256, "pooled_projection_dim": 256, "num_layers": 2,
        "dual_attention_layers": [0],
    },
}  # fmt: skip


def write_k_quants(gguf: Any, original: Path, path: Path) -> int:
    """Write random tensors with the names and shapes of those of an original checkpoint.

    Return how many of the tensors are K-quants. As in Q4_K_M, Q4_K and Q6_K are mixed. The writer
    is that of the package `gguf`.
    """
    random = np.random.default_rng(0)
    # The byte offsets of the f16 scales in a block: of d, and for Q4_K of dmin.
    scale_offsets = {gguf.GGMLQuantizationType.Q4_K: (0, 2), gguf.GGMLQuantizationType.Q6_K: (208,)}
    writer, count = gguf.GGUFWriter(path, path.stem), 0
    for name, tensor in tc.load_file(original).items():
        if kind_of(name, tensor, "q4_k") != "q4_k" or tensor.shape[1] % 256:
            values = random.standard_normal(tensor.shape).astype(np.float32) * 0.05
            writer.add_tensor(name.removeprefix(PREFIX), values)
            continue
        kind = list(scale_offsets)[count % 2]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (tensor.numel() // elements, size), np.uint8)
        # Two values, so that d and dmin cannot be swapped unnoticed.
        for offset, scale in zip(scale_offsets[kind], (1e-4, 3e-4), strict=False):
            blocks[:, offset : offset + 2] = np.float16([scale]).view(np.uint8)
        rows = blocks.reshape(tensor.shape[0], -1)
        writer.add_tensor(name.removeprefix(PREFIX), rows, raw_dtype=kind)
        count += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count


@pytest.mark.parametrize("family", WIDE)
def test_k_quants_have_the_values_that_gguf_reads(family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    transformer, inputs = FAMILIES[family]
    golden = json.loads((GOLDEN / family / "transformer" / "config.json").read_text())
    # The configuration is not in the folder of `original`: from a configuration beside a file of
    # safetensors without `PREFIX`, the loader concludes that the file has the names of diffusers.
    (config := tmp_path / "config" / "config.json").parent.mkdir()
    config.write_text(json.dumps(golden | WIDE[family]))
    original, path = tmp_path / "original.safetensors", tmp_path / f"{family}.gguf"
    model = transformer.from_config(config, dtype="f32")
    tc.models.save_checkpoint(original, {"transformer": model})
    count = write_k_quants(gguf, original, path)
    assert count > 10
    values = {
        tensor.name: tc.tensor(
            gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    # From here on, the original checkpoint has the values that `gguf` reads.
    tc.save_file(values, original)
    found = transformer.from_pretrained(path, dtype="f32", config=config)
    plain = transformer.from_pretrained(original, dtype="f32", config=config)
    for name, tensor in plain.named_tensors().items():
        np.testing.assert_array_equal(found.named_tensors()[name].numpy(), tensor.numpy(), name)
    random = np.random.default_rng(1)
    case = tc.load_file(GOLDEN / family / "transformer_forward.safetensors")
    # Features of texts have 256 values, not those of the golden case.
    for name in ("encoder_hidden_states", "pooled_projections"):
        shape = (*case[name].shape[:-1], 256)
        case[name] = tc.tensor(random.standard_normal(shape).astype(np.float32))
    names = ("hidden_states", "encoder_hidden_states", "timestep", *inputs)
    predictions = [each(**{name: case[name] for name in names}).numpy() for each in (found, plain)]
    assert np.isfinite(predictions[0]).all()
    np.testing.assert_array_equal(*predictions)
