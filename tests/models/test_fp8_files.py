"""FP8 weights in the three forms of ComfyUI's files.

The forms are "plain" (codes without a scale), "old" (each layer has a `scale_weight`) and "new"
(each layer has a `weight_scale` and a `comfy_quant`, which names the format).
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import FluxTransformer

GOLDEN = Path(__file__).parents[1] / "golden" / "flux" / "transformer"
FORMAT = json.dumps({"format": "float8_e4m3fn"}).encode()


def e4m3() -> np.ndarray:
    """The values of the 256 codes: sign, 4 exponent bits (bias 7), 3 fraction bits; no infinity."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    values[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -values, values)


def encoded(values: np.ndarray) -> np.ndarray:
    """The E4M3 codes whose values are nearest to `values`."""
    known = e4m3()
    order = np.argsort(np.where(np.isnan(known), np.inf, known), kind="stable")[:254]
    middles = (known[order][1:] + known[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a safetensors file byte by byte: the library's own writer has no FP8."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        place = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantised(
    form: str,
) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, np.ndarray]]:
    """The golden transformer's tensors in one of the forms, and their values after rounding."""
    stored = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    tensors, expected = {}, {}
    for name, tensor in stored.items():
        values = tensor.to("f32").numpy()
        expected[name] = values
        if values.ndim < 2 or "embed" in name:
            tensors[name] = ("F32", values.shape, values.tobytes())
            continue
        scale = np.float32(1) if form == "plain" else np.float32(np.abs(values).max() / 448)
        codes = encoded(values / scale)
        expected[name] = e4m3()[codes].astype(np.float32) * scale
        tensors[name] = ("F8_E4M3", values.shape, codes.tobytes())
        layer = name.removesuffix("weight")
        if form == "old":
            tensors[f"{layer}scale_weight"] = ("F32", (), scale.tobytes())
            tensors[f"{layer}scale_input"] = ("F32", (), scale.tobytes())
        elif form == "new":
            tensors[f"{layer}weight_scale"] = ("F32", (1,), scale.tobytes())
            tensors[f"{layer}comfy_quant"] = ("U8", (len(FORMAT),), FORMAT)
    if form == "old":
        tensors["scaled_fp8"] = ("F8_E4M3", (0,), b"")
    return tensors, expected


@pytest.mark.parametrize("form", ["plain", "old", "new"])
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, expected = quantised(form)
    write(path, tensors)
    model = FluxTransformer.from_pretrained(path, dtype="f32", config=GOLDEN / "config.json")
    for name, tensor in model.named_tensors().items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-6, err_msg=name)
    # With three fraction bits, rounding changes a normal value by at most a sixteenth of the value.
    original = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    name = "transformer_blocks.0.attn.to_q.weight"
    near = original[name].to("f32").numpy()
    difference = np.abs(expected[name] - near).max() / np.abs(near).max()
    assert 0 < difference < 1 / 16
    half = FluxTransformer.from_pretrained(path, dtype="bf16", config=GOLDEN / "config.json")
    assert half.dtype == "bf16"


def test_other_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, _ = quantised("new")
    other = json.dumps({"format": "nvfp4"}).encode()
    name = "transformer_blocks.0.attn.to_q.comfy_quant"
    write(path, tensors | {name: ("U8", (len(other),), other)})
    with pytest.raises(tc.WeightsFormatError, match='quantized as "nvfp4", which is not supported'):
        FluxTransformer.from_pretrained(path, config=GOLDEN / "config.json")
    tensors, _ = quantised("old")
    name = "transformer_blocks.0.attn.to_q.scale_weight"
    write(path, tensors | {name: ("F32", (2,), np.ones(2, np.float32).tobytes())})
    with pytest.raises(tc.WeightsFormatError, match="expected one scale for"):
        FluxTransformer.from_pretrained(path, config=GOLDEN / "config.json")
