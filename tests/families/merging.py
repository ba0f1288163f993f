"""Runs `merge`, and checks the files in ComfyUI's format that `merge --to fp8` and `int8` write."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

import trainable_candle as tc
from trainable_candle.cli import main

# The largest value of a code.
LARGEST = {"fp8": 448, "int8": 127}
# The name of the dtype in a safetensors header, and the name of the format in ComfyUI.
FORMATS = {"fp8": ("F8_E4M3", "float8_e4m3fn"), "int8": ("I8", "int8_tensorwise")}


def make_adapter(folder: Path, part: str, path: Path) -> Path:
    """Write a LoRA with nonzero factors for a part of a pipeline's folder; return its file."""
    model = tc.models.load(folder, subfolder=part, dtype="f32")
    adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules="all-attention"))
    tc.manual_seed(3)
    for var in adapter.parameters():
        var.set(tc.randn(var.shape) * 0.3)
    adapter.save(path)
    return path


def merge(given: list[str], output: Path, *flags: str) -> int:
    """Run `merge` in f32 and return the exit status."""
    return main(["merge", *given, "--output", str(output), "--precision", "f32", *flags])


def losses_in(printed: str) -> tuple[float, float]:
    """Return the losses before and after merging that `merge` has printed."""
    losses = printed.partition("loss: ")[2].partition("\n")[0]
    before, after = (float(part.split()[-1]) for part in losses.split(","))
    return before, after


def raw_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Read the dtype and the values of each tensor of a safetensors file; fp8, bf16 give bits."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    dtypes = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8, "I8": np.int8,
              "F8_E4M3": np.uint8}  # fmt: skip
    found = {}
    for key, entry in header.items():
        if key != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[start:end], dtypes[entry["dtype"]])
            found[key] = (entry["dtype"], values.reshape(entry["shape"]))
    return found


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the values of fp8 codes: a sign, four bits of exponent, three of fraction."""
    bits = codes.astype(np.int64)
    exponent, fraction = bits >> 3 & 15, bits & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, fraction / 8 * 2.0**-6, normal) * np.where(bits & 128, -1, 1)


def check_codes(plain: Path, written: Path, to: str) -> set[str]:
    """Check a file in the format `to` against the unquantized one; return the keys of its codes."""
    expected, found = raw_tensors(plain), raw_tensors(written)
    dtype_of_codes, format = FORMATS[to]
    quantized = {key for key, (dtype, _) in found.items() if dtype == dtype_of_codes}
    for key in quantized:
        prefix, values = key.removesuffix("weight"), expected[key][1]
        scale = found[f"{prefix}weight_scale"][1]
        # fp8 has one scale for each weight, int8 one for each row.
        largest = np.abs(values).max() if to == "fp8" else np.abs(values).max(1, keepdims=True)
        assert scale.shape == (() if to == "fp8" else (values.shape[0], 1))
        np.testing.assert_allclose(scale, largest / LARGEST[to], rtol=1e-6)
        codes = found[key][1]
        code_values = e4m3(codes) if to == "fp8" else codes.astype(np.float64)
        # Rounding errs by up to half a unit in the last place. fp8 has three fraction bits, so the
        # error is at most 1/16 of the value, or 2^-10 scales for subnormal codes. For int8, it is
        # at most half a scale.
        limit = np.maximum(np.abs(values) / 16, scale * 2**-10) if to == "fp8" else scale / 2
        assert (np.abs(code_values * scale - values) <= limit * (1 + 1e-5)).all(), key
        assert json.loads(found[f"{prefix}comfy_quant"][1].tobytes()) == {"format": format}
    added = {f"{key.removesuffix('weight')}{end}" for key in quantized
             for end in ("weight_scale", "comfy_quant")}  # fmt: skip
    assert found.keys() - added == expected.keys()
    for key in expected.keys() - quantized:
        np.testing.assert_array_equal(found[key][1], expected[key][1], key)
    return quantized


def check_that_loading_keeps_codes(written: Path, part: str, to: str) -> None:
    """Check that a model loaded with `quantize` set to the file's format has the file's codes.

    If loading rounded the weights again, they could differ from those of the dequantized model.
    """
    read: dict[str, Any] = {"dtype": "f32", "subfolder": part}
    dequantized, stored = (
        tc.models.load(written, **read, **more) for more in ({}, {"quantize": to})
    )
    stored_tensors = stored.named_tensors()
    for key, tensor in dequantized.named_tensors().items():
        if key in stored_tensors:
            np.testing.assert_array_equal(stored_tensors[key].numpy(), tensor.numpy(), key)
