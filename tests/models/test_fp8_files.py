"""FP8 weights in the forms of ComfyUI's files.

The forms are "plain" (codes without a scale), "old" (each layer has a `scale_weight`) and "new"
(each layer has a `weight_scale` and a `comfy_quant`, which names the format). "bytes" is "new" with
the codes in tensors of the dtype U8. "header" is "new" with the formats in the header instead of
the `comfy_quant` tensors.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import FluxTransformer

from .test_transformers import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden" / "flux" / "transformer"
FORMAT = json.dumps({"format": "float8_e4m3fn"}).encode()
NAME = "transformer_blocks.0.attn.to_q.weight"
LAYER = NAME.removesuffix(".weight")
# By name: the dtype, the shape and the bytes of a tensor.
Entries = dict[str, tuple[str, tuple[int, ...], bytes]]


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
    # The two NaNs come last in the order, and are left out.
    known = e4m3()
    order = np.argsort(np.where(np.isnan(known), np.inf, known), kind="stable")[:254]
    middles = (known[order][1:] + known[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def write(
    path: Path,
    tensors: Entries,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file byte by byte: the library's own writer has no FP8."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def golden_in_fp8(form: str) -> tuple[Entries, dict[str, np.ndarray]]:
    """The tensors of the transformer in `GOLDEN` in one of the forms, and their rounded values."""
    stored = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    return in_fp8({name: tensor.to("f32").numpy() for name, tensor in stored.items()}, form)


def in_fp8(originals: dict[str, np.ndarray], form: str) -> tuple[Entries, dict[str, np.ndarray]]:
    """The tensors in one of the forms, and their values after rounding.

    Only matrices of layers other than embeddings are quantized.
    """
    tensors: Entries = {}
    expected = {}
    for name, values in originals.items():
        expected[name] = values
        if values.ndim < 2 or "embed" in name or not name.endswith(".weight"):
            tensors[name] = ("F32", values.shape, values.tobytes())
            continue
        # 448 is the largest value of a code.
        scale = np.float32(1) if form == "plain" else np.float32(np.abs(values).max() / 448)
        codes = encoded(values / scale)
        expected[name] = e4m3()[codes].astype(np.float32) * scale
        dtype = "U8" if form == "bytes" else "F8_E4M3"
        tensors[name] = (dtype, values.shape, codes.tobytes())
        prefix = name.removesuffix("weight")
        if form == "old":
            tensors[f"{prefix}scale_weight"] = ("F32", (), scale.tobytes())
            tensors[f"{prefix}scale_input"] = ("F32", (), scale.tobytes())
        elif form in {"new", "bytes", "header"}:
            tensors[f"{prefix}weight_scale"] = ("F32", (1,), scale.tobytes())
            if form != "header":
                tensors[f"{prefix}comfy_quant"] = ("U8", (len(FORMAT),), FORMAT)
    if form == "old":
        tensors["scaled_fp8"] = ("F8_E4M3", (0,), b"")
    return tensors, expected


FORMS = ("plain", "old", "new", "bytes", "header")


def format_metadata(layers: list[str], **format: object) -> dict[str, str]:
    """The metadata that says for each of some layers that its codes have this format."""
    formats = {"format_version": "1.0", "layers": dict.fromkeys(layers, format)}
    return {"_quantization_metadata": json.dumps(formats)}


def metadata_of(form: str, tensors: Entries) -> dict[str, str]:
    """The metadata of a file of one of the forms."""
    if form != "header":
        return {}
    layers = [name for name, (dtype, *_) in tensors.items() if dtype == "F8_E4M3"]
    return format_metadata(
        [name.removesuffix(".weight") for name in layers], format="float8_e4m3fn"
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, expected = golden_in_fp8(form)
    write(path, tensors, metadata_of(form, tensors))
    model = FluxTransformer.from_pretrained(path, dtype="f32", config=GOLDEN / "config.json")
    for name, tensor in model.named_tensors().items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-6, err_msg=name)
    # With three fraction bits, rounding changes a normal value by at most a sixteenth of the value.
    original = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    exact = original[NAME].to("f32").numpy()
    difference = np.abs(expected[NAME] - exact).max() / np.abs(exact).max()
    assert 0 < difference < 1 / 16
    in_bf16 = FluxTransformer.from_pretrained(path, dtype="bf16", config=GOLDEN / "config.json")
    assert in_bf16.dtype == "bf16"


def load(path: Path) -> FluxTransformer:
    return FluxTransformer.from_pretrained(path, dtype="f32", config=GOLDEN / "config.json")


def test_codes_in_e5m2_are_read(tmp_path: Path) -> None:
    """An E5M2 number is the upper byte of an f16 number."""
    tensors, expected = golden_in_fp8("plain")
    # The bits of f16 numbers whose lower byte is 0.
    halves = expected[NAME].astype(np.float16).view(np.uint16) & 0xFF00
    codes = (halves >> 8).astype(np.uint8)
    write(
        tmp_path / "model.safetensors", tensors | {NAME: ("F8_E5M2", halves.shape, codes.tobytes())}
    )
    found = load(tmp_path / "model.safetensors").named_tensors()[NAME].numpy()
    np.testing.assert_array_equal(found, halves.view(np.float16).astype(np.float32))


def comfy_quant(**format: object) -> Entries:
    """The tensor that says that the layer `LAYER` has this format."""
    text = json.dumps(format).encode()
    return {f"{LAYER}.comfy_quant": ("U8", (len(text),), text)}


def filled(value: float, *dims: int, suffix: str = "weight_scale") -> Entries:
    """A tensor of the layer `LAYER` with the shape `dims`, filled with `value`."""
    values = np.full(dims, value, np.float32)
    return {f"{LAYER}.{suffix}": ("F32", dims, values.tobytes())}


# Changed tensors, metadata, and what the error says. The file has the form "header" if there is
# metadata, else "new". The layer's weight is 32 x 32.
WRONG: list[tuple[Entries, dict[str, str], str]] = [
    # The weights of NVFP4 have two codes in a byte.
    (
        {NAME: ("U8", (32, 16), bytes(512)), **comfy_quant(format="nvfp4")},
        {},
        'quantized as "nvfp4", which is not supported',
    ),
    (comfy_quant(format="mxfp8"), {}, 'quantized as "mxfp8"'),
    (comfy_quant(format="float8_e5m2"), {}, 'quantized as "float8_e5m2"'),
    (
        {
            NAME: ("I8", (32, 32), bytes(1024)),
            **comfy_quant(format="int8_tensorwise", convrot=True),
        },
        {},
        r"int8_tensorwise \(convrot\)",
    ),
    ({}, format_metadata([LAYER], format="awq_w4a16"), 'quantized as "awq_w4a16"'),
    (filled(1, 2), {}, "expected one scale for .* or one for each of its 32 rows"),
    (filled(float("nan")), {}, "to_q.weight_scale.* has the scale NaN, expected a positive number"),
    (filled(float("inf")), {}, "has the scale inf, expected"),
    (filled(-0.5), {}, "has the scale -0.5, expected"),
    (filled(1, suffix="scale_weight"), {}, "to_q.weight.* has several tensors of scales"),
    (filled(1, 32, suffix="pre_quant_scale"), {}, "scales the inputs of layers"),
    (filled(1, 16, suffix="weight_code"), {}, "ComfyUI's NF4 .bitsandbytes' NF4 is supported"),
    (filled(1, suffix="weight_scale_2"), {}, "weights of NVFP4"),
    (filled(1, 2, suffix="wscales"), {}, r"SVDQuant \(Nunchaku\) are not supported; load the unq"),
    (filled(1, 2, suffix="qzeros"), {}, "weights of GPTQ or AWQ"),
    (filled(1, 2, suffix="weight._data"), {}, "weights of quanto"),
    (filled(1, 2, suffix="_weight_qdata"), {}, "weights of torchao"),
    (filled(1, 2, suffix="weight_scale_inv"), {}, "a scale for each block of a matrix"),
]


@pytest.mark.parametrize(
    ("changes", "metadata", "message"), WRONG, ids=[message for _, _, message in WRONG]
)
def test_other_formats_and_wrong_scales_are_reported(
    changes: Entries, metadata: dict[str, str], message: str, tmp_path: Path
) -> None:
    tensors, _ = golden_in_fp8("header" if metadata else "new")
    path = tmp_path / "model.safetensors"
    write(path, tensors | changes, metadata)
    for quantize in (None, "fp8"):
        with pytest.raises(tc.WeightsFormatError, match=message):
            FluxTransformer.from_pretrained(path, config=GOLDEN / "config.json", quantize=quantize)


@pytest.mark.parametrize("form", FORMS)
def test_a_code_that_is_nan_is_an_error(form: str, tmp_path: Path) -> None:
    tensors, _ = golden_in_fp8(form)
    dtype, shape, codes = tensors[NAME]
    with_nan = codes[:-1] + b"\x7f"  # exponent and fraction of ones
    path = tmp_path / "model.safetensors"
    write(path, tensors | {NAME: (dtype, shape, with_nan)}, metadata_of(form, tensors))
    with pytest.raises(tc.WeightsFormatError, match=r"attn.to_q.weight.* codes are NaN"):
        load(path)


@pytest.mark.parametrize("form", ["plain", "old", "new"])
@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_every_family_are_read(name: str, form: str, tmp_path: Path) -> None:
    """The values equal those of an unquantized file, also if they are loaded as fp8."""
    family = FAMILIES[name]
    original, path = tmp_path / "original.safetensors", tmp_path / "fp8.safetensors"
    tc.models.save_checkpoint(original, {"transformer": family.load()})
    stored = {key: tensor.to("f32").numpy() for key, tensor in tc.load_file(original).items()}
    tensors, expected = in_fp8(stored, form)
    assert sum(dtype == "F8_E4M3" for dtype, *_ in tensors.values()) > 5
    write(path, tensors)
    # From here on, the file `original` holds the rounded values.
    tc.save_file({key: tc.tensor(values) for key, values in expected.items()}, original)
    options = {"dtype": "f32", "config": family.transformer / "config.json"}
    values = family.kind.from_pretrained(original, **options).named_tensors()
    for quantize in (None, "fp8"):
        found = family.kind.from_pretrained(path, **options, quantize=quantize).named_tensors()
        for key, tensor in found.items():
            wanted = values[key].numpy()
            np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-6, err_msg=key)
