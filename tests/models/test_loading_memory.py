"""Loading takes little more memory than the loaded model, which may be quantized."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
from tests.peak_memory import READS_PROC, growth, write_zeros

import trainable_candle as tc
from trainable_candle.export.gguf_file import Entry, write
from trainable_candle.export.gguf_model import model_facts, parameter_name
from trainable_candle.export.quantized import quantize_folder
from trainable_candle.models import CausalLM

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = GOLDEN / "llm" / "llama" / "config.json"
FLUX = GOLDEN / "flux" / "transformer" / "config.json"
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FLUX_SIZES = {
    "num_attention_heads": 8, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56],
    "num_layers": 1,
}  # fmt: skip
# Loads a small model first, so that threads and buffers of the library are not counted.
SETUP = """
from trainable_candle.models import load

small, path, form = sys.argv[1:]
load(small, dtype="bf16", quantize=form or None)
"""
LOAD = 'model = load(path, dtype="bf16", quantize=form or None)'

pytestmark = READS_PROC


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of 76 million random parameters in bf16."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(json.loads(LLAMA.read_text()) | SIZES))
    CausalLM.from_config(folder / "config.json", dtype="bf16").save_pretrained(folder)
    return folder


def peak(path: Path, form: str | None, small: Path = LLAMA.parent) -> int:
    """The most bytes by which a process grows while it loads a model, after the model `small`.

    With `form`, loading quantizes the weights to this format.
    """
    return growth(SETUP, LOAD, str(small), str(path), form or "")


def size_in_bf16(model: Path) -> int:
    """The bytes of a model's file."""
    return (model / "model.safetensors").stat().st_size


# `share` is the size of the loaded model, divided by its size in bf16. Quantized weights also have
# scales, so the share of nf4 is above 4 / 16. Here these scales are 8-bit codes. For
# `quantize_folder` below they are f32, so the share is higher, 0.28.
@pytest.mark.parametrize(("form", "share"), [(None, 1.0), ("int8", 0.5), ("nf4", 0.26)])
def test_weights_are_loaded_and_quantized_one_by_one(
    model: Path, form: str | None, share: float
) -> None:
    found = peak(model, form) / size_in_bf16(model)
    # Besides the model there are a few copies of one weight in f32. Each takes 8 % of the bytes of
    # the model in bf16.
    assert share < found < share + 0.25


def write_flux(folder: Path, blocks: int) -> tc.PartFacts:
    """Write a Flux of zeros in bf16, as a sparse file, and return its facts.

    Besides `blocks` blocks with a single stream, it has one with two streams.
    """
    config = json.loads(FLUX.read_text()) | FLUX_SIZES | {"num_single_layers": blocks}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "diffusion_pytorch_model.safetensors"
    tc.save_file({"x": tc.zeros(1)}, path)  # the facts come from the configuration
    (facts,) = tc.inspect(folder).parts.values()
    write_zeros(path, facts.tensors, "BF16")
    return facts


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_transformer_of_images_is_quantized_weight_by_weight(form: str, tmp_path: Path) -> None:
    """Beside the codes, loading takes the same memory for any number of blocks."""
    extra_bytes = []  # what loading takes beside the loaded weights
    for blocks in (1, 6):
        path = tmp_path / str(blocks)
        facts = write_flux(path, blocks)
        extra_bytes.append(peak(path, form, FLUX.parent) - facts.weight_bytes("bf16", form))
    largest = max(map(math.prod, facts.layers.values()))  # elements of the largest weight
    # Less than five copies of the largest weight in f32, which has 4 bytes for each element.
    assert 0 < extra_bytes[0] < 5 * 4 * largest
    # The larger model has five more blocks, with 76 million parameters in all. Copies of these
    # would exceed the tolerance, a byte for each element of the largest weight alone.
    assert extra_bytes[1] == pytest.approx(extra_bytes[0], abs=largest)


@pytest.mark.parametrize(("form", "share"), [("fp8", 0.5), ("nf4", 0.28)])
def test_codes_of_a_folder_are_loaded_without_their_values(
    model: Path, tmp_path: Path, form: str, share: float
) -> None:
    # The values are the dequantized weights: with them in bf16, the quotient would be at least 1.
    tc.models.load(model).save_pretrained(tmp_path)
    # The only part of a language model has an empty name.
    layers = [name for name in tc.inspect(model).parts[""].layers if "layers." in name]
    quantize_folder(tmp_path, layers, form)
    assert share < peak(tmp_path, form) / size_in_bf16(model) < share + 0.2


def test_blocks_of_a_gguf_file_are_loaded_without_their_values(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    entries = []
    for name, tensor in tc.models.load(model).named_tensors().items():
        kind = "q8_0" if tensor.ndim == 2 else "f32"
        gguf_name = parameter_name(name.removeprefix("model."))
        entries.append(Entry(gguf_name, tuple(tensor.shape), kind, partial(tensor.to, "f32")))
    with path.open("wb") as file:
        write(file, model_facts(json.loads((model / "config.json").read_text())), entries)
    # A block of q8_0 is 32 codes of 8 bits and an f16 scale: 8.5 bits for each element, of 16 in
    # bf16.
    assert 0.5 < peak(path, None) / size_in_bf16(model) < 0.75
