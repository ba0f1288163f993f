"""Files whose weights are quantized already: the loader keeps the codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import FluxTransformer

from .test_fp8_files import GOLDEN, e4m3, quantised, write

CONFIG = GOLDEN / "config.json"
Entry = tuple[str, tuple[int, ...], bytes]


@pytest.mark.parametrize("form", ["plain", "old", "new"])
def test_codes_of_comfyui_are_kept(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, expected = quantised(form)
    write(path, tensors)
    model = FluxTransformer.from_pretrained(path, dtype="f32", config=CONFIG, quantize="fp8")
    for name, tensor in model.named_tensors().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)
    # If `quantize` asks for another format, the loader dequantizes the weights and quantizes again.
    other = FluxTransformer.from_pretrained(path, dtype="f32", config=CONFIG, quantize="int8")
    name = "transformer_blocks.0.attn.to_q.weight"
    difference = np.abs(other.named_tensors()[name].numpy() - expected[name]).max()
    assert 0 < difference < np.abs(expected[name]).max() / 100


def test_a_code_that_is_nan_is_an_error(tmp_path: Path) -> None:
    tensors, _ = quantised("old")
    name = "transformer_blocks.0.attn.to_q.weight"
    dtype, shape, content = tensors[name]
    assert np.isnan(e4m3()[content[0] | 0x7F])
    tensors[name] = (dtype, shape, bytes([content[0] | 0x7F]) + content[1:])
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(tc.errors.ArgumentError, match="NaN"):
        FluxTransformer.from_pretrained(
            tmp_path / "model.safetensors", dtype="f32", config=CONFIG, quantize="fp8"
        )


def packed(name: str, values: np.ndarray) -> tuple[dict[str, Entry], np.ndarray]:
    """The tensors in which bitsandbytes stores a weight with quantized scales, and its values."""
    found = tc.quantize(tc.tensor(values), "nf4")
    parts = {key: tensor.numpy() for key, tensor in found.tensors().items()}
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(values.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(parts["offset"]),
    }  # fmt: skip
    text = json.dumps(state).encode()
    tensors = {
        name: ("U8", (parts["codes"].size, 1), parts["codes"].tobytes()),
        f"{name}.absmax": ("U8", parts["scale_codes"].shape, parts["scale_codes"].tobytes()),
        f"{name}.nested_absmax": ("F32", parts["scales"].shape, parts["scales"].tobytes()),
        f"{name}.nested_quant_map": ("F32", (256,), dynamic_map().tobytes()),
        f"{name}.quant_map": ("F32", (16,), QUANTILES.tobytes()),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (len(text),), text),
    }
    return tensors, found.dequantize().numpy()


# The values of the 16 codes of NF4.
QUANTILES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def dynamic_map() -> np.ndarray:
    """The values of bitsandbytes' signed 8-bit codes, from the golden file of its optimizers."""
    path = Path(__file__).parents[1] / "golden" / "optim" / "bitsandbytes.safetensors"
    return tc.load_file(path)["map.signed"].numpy().astype(np.float32)


def folder_of_bitsandbytes(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    stored = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    tensors: dict[str, Entry] = {}
    expected = {}
    for name, tensor in stored.items():
        values = tensor.to("f32").numpy()
        expected[name] = values
        if values.ndim == 2 and "transformer_blocks." in name:
            entries, expected[name] = packed(name, values)
            tensors |= entries
        else:
            tensors[name] = ("F32", values.shape, values.tobytes())
    write(folder / "diffusion_pytorch_model.safetensors", tensors)
    config = json.loads(CONFIG.read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def test_folders_of_bitsandbytes_are_read(tmp_path: Path) -> None:
    expected = folder_of_bitsandbytes(tmp_path)
    for quantize in (None, "nf4"):
        model = FluxTransformer.from_pretrained(tmp_path, dtype="f32", quantize=quantize)
        for name, tensor in model.named_tensors().items():
            np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize(
    "changes", [{"quant_method": "gptq"}, {"load_in_4bit": False}, {"bnb_4bit_quant_type": "fp4"}]
)
def test_other_quantizations_are_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder_of_bitsandbytes(tmp_path, **changes)
    with pytest.raises(tc.errors.ConfigError, match="load the unquantized weights"):
        FluxTransformer.from_pretrained(tmp_path)
