"""Files whose weights are quantized already: the loader keeps the codes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.models import FluxTransformer

from .test_fp8_files import FORMS, GOLDEN, e4m3, golden_in_fp8, metadata_of, write

# `FORMS` are the names of the forms in which ComfyUI's files store FP8 weights; test_fp8_files.py
# describes them. The golden model is a small Flux transformer.
CONFIG = GOLDEN / "config.json"
# The dtype, the shape and the bytes of a tensor in a file.
Entry = tuple[str, tuple[int, ...], bytes]


@pytest.mark.parametrize("form", FORMS)
def test_fp8_codes_of_comfyui_are_kept(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, expected = golden_in_fp8(form)
    write(path, tensors, metadata_of(form, tensors))
    model = FluxTransformer.from_pretrained(path, dtype="f32", config=CONFIG, quantize="fp8")
    for name, tensor in model.named_tensors().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_fp8_codes_are_quantized_again_to_another_format(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors, expected = golden_in_fp8(form)
    write(path, tensors, metadata_of(form, tensors))
    model = FluxTransformer.from_pretrained(path, dtype="f32", config=CONFIG, quantize="int8")
    name = "transformer_blocks.0.attn.to_q.weight"
    difference = np.abs(model.named_tensors()[name].numpy() - expected[name]).max()
    # int8 rounds by at most half a step: 1 / 254 of the largest magnitude in the row.
    assert 0 < difference < np.abs(expected[name]).max() / 100


def test_a_code_that_is_nan_is_an_error(tmp_path: Path) -> None:
    tensors, _ = golden_in_fp8("old")  # any of the forms
    name = "transformer_blocks.0.attn.to_q.weight"
    dtype, shape, content = tensors[name]
    code = content[0] | 0x7F  # all bits but the sign
    assert np.isnan(e4m3()[code])  # `e4m3` returns the values of the 256 codes.
    tensors[name] = (dtype, shape, bytes([code]) + content[1:])
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(tc.errors.ArgumentError, match="NaN"):
        FluxTransformer.from_pretrained(
            tmp_path / "model.safetensors", dtype="f32", config=CONFIG, quantize="fp8"
        )


def packed(name: str, values: np.ndarray) -> tuple[dict[str, Entry], np.ndarray]:
    """Return the tensors in which bitsandbytes stores a weight in NF4, and the rounded values.

    The scales are quantized, too.
    """
    quantized = tc.quantize(tc.tensor(values), "nf4")
    parts = {key: tensor.numpy() for key, tensor in quantized.tensors().items()}
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
    return tensors, quantized.dequantize().numpy()


# The values of the 16 codes of NF4.
QUANTILES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def dynamic_map() -> np.ndarray:
    """Return the values of bitsandbytes' signed 8-bit codes, from a golden file."""
    path = Path(__file__).parents[1] / "golden" / "optim" / "bitsandbytes.safetensors"
    return tc.load_file(path)["map.signed"].numpy().astype(np.float32)


def tensors_of_bitsandbytes(
    storage: str = "U8",
) -> tuple[dict[str, Entry], dict[str, np.ndarray]]:
    """Return the tensors of the golden transformer in NF4, and the rounded values.

    `storage` is the dtype of the tensors that hold the codes as bytes (`bnb_4bit_quant_storage`).
    """
    stored = tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors")
    tensors: dict[str, Entry] = {}
    expected = {}
    for name, tensor in stored.items():
        values = tensor.to("f32").numpy()
        expected[name] = values
        if values.ndim == 2 and "transformer_blocks." in name:
            entries, expected[name] = packed(name, values)
            _, (byte_count, _), codes = entries[name]
            size = {"U8": 1, "BF16": 2, "F32": 4}[storage]
            tensors |= entries | {name: (storage, (byte_count // size, 1), codes)}
        else:
            tensors[name] = ("F32", values.shape, values.tobytes())
    return tensors, expected


def write_folder_of_bitsandbytes(
    folder: Path, storage: str = "U8", **changes: Any
) -> dict[str, np.ndarray]:
    """Write the transformer in NF4 with its configuration, and return the rounded values.

    `changes` replaces entries of `quantization_config`.
    """
    tensors, expected = tensors_of_bitsandbytes(storage)
    write(folder / "diffusion_pytorch_model.safetensors", tensors)
    config = json.loads(CONFIG.read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("storage", ["U8", "BF16", "F32"])
def test_folders_of_bitsandbytes_are_read(tmp_path: Path, storage: str) -> None:
    expected = write_folder_of_bitsandbytes(tmp_path, storage)
    for quantize in (None, "nf4"):
        model = FluxTransformer.from_pretrained(tmp_path, dtype="f32", quantize=quantize)
        for name, tensor in model.named_tensors().items():
            np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize("double", [False, True], ids=["plain scales", "quantized scales"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_folder_by_bitsandbytes_has_the_values_of_bitsandbytes(
    tmp_path: Path, dtype: str, double: bool
) -> None:
    """The weights are those of `Linear4bit`, whose state transformers and diffusers save."""
    torch = pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    # Only config.json is used: below, the weights of bitsandbytes replace the file of tensors.
    write_folder_of_bitsandbytes(tmp_path, bnb_4bit_use_double_quant=double)
    tensors, expected = {}, {}
    for name, tensor in tc.load_file(GOLDEN / "diffusion_pytorch_model.safetensors").items():
        tensors[name], values = tensor.to(dtype), tensor.to("f32").numpy()
        expected[name] = tensors[name].to("f32").numpy()
        if values.ndim != 2 or "transformer_blocks." not in name:
            continue
        weight = bitsandbytes.nn.Params4bit(
            torch.from_numpy(values).to(kind),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=double,
        ).to("cpu")
        layer = bitsandbytes.nn.Linear4bit(*values.shape[::-1], bias=False, quant_type="nf4")
        layer.weight = weight
        for key, part in layer.state_dict().items():
            tensors[name.removesuffix("weight") + key] = tc.tensor(part.numpy())
        dequantized = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert dequantized.dtype == kind
        expected[name] = dequantized.float().numpy()
    assert any(name.endswith(".nested_absmax") for name in tensors) == double
    tc.save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    for quantize in (None, "nf4"):
        model = FluxTransformer.from_pretrained(tmp_path, dtype=dtype, quantize=quantize)
        for name, tensor in model.named_tensors().items():
            np.testing.assert_array_equal(tensor.to("f32").numpy(), expected[name], err_msg=name)


def test_a_wrong_number_of_scales_is_an_error_with_the_name_of_the_weight(tmp_path: Path) -> None:
    write_folder_of_bitsandbytes(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors, _ = tensors_of_bitsandbytes()
    key = next(key for key in tensors if key.endswith(".absmax"))
    dtype, (count,), content = tensors[key]
    write(file, tensors | {key: (dtype, (count - 1,), content[:-1])})
    weight = re.escape(key.removesuffix(".absmax"))
    message = f'{file.name}: "{weight}": the codes of'
    with pytest.raises(tc.errors.WeightsFormatError, match=message):
        FluxTransformer.from_pretrained(tmp_path)


def with_plain_scales(name: str, values: np.ndarray) -> tuple[dict[str, Entry], np.ndarray]:
    """Do what `packed` does, but with scales in f32, which are bitsandbytes' default."""
    blocks = values.reshape(-1, 64)
    scales = np.abs(blocks).max(1)
    middles = (QUANTILES[1:] + QUANTILES[:-1]) / 2
    codes = np.searchsorted(middles, blocks / scales[:, None]).astype(np.uint8)
    pairs = codes.reshape(-1, 2)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(values.shape),
    }  # fmt: skip
    text = json.dumps(state).encode()
    tensors = {
        name: ("U8", (len(pairs), 1), (pairs[:, 0] << 4 | pairs[:, 1]).tobytes()),
        f"{name}.absmax": ("F32", scales.shape, scales.tobytes()),
        f"{name}.quant_map": ("F32", (16,), QUANTILES.tobytes()),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (len(text),), text),
    }
    return tensors, (QUANTILES[codes] * scales[:, None]).reshape(values.shape)


def test_layers_that_a_file_joins_keep_their_codes(tmp_path: Path) -> None:
    """Forge's files join queries, keys and values in one weight.

    A row has 32 elements, and a block with one scale has 64, so a block consists of two rows. The
    loader splits the weight between blocks, so each part keeps its codes and scales.
    """
    plain = FluxTransformer.from_pretrained(GOLDEN, dtype="f32")
    original = tmp_path / "original.safetensors"
    tc.models.save_checkpoint(original, {"transformer": plain})
    tensors: dict[str, Entry] = {}
    values = {}
    for name, tensor in tc.load_file(original).items():
        values[name] = tensor.numpy()
        if tensor.ndim == 2 and "_blocks." in name:
            entries, values[name] = with_plain_scales(name, values[name])
            tensors |= entries
        else:
            tensors[name] = ("F32", tensor.shape, values[name].tobytes())
    assert any("qkv" in name for name in tensors)
    path = tmp_path / "forge.safetensors"
    write(path, tensors)
    # The expected values are those of a plain file with the rounded values.
    tc.save_file({name: tc.tensor(value) for name, value in values.items()}, original)
    expected = FluxTransformer.from_pretrained(original, dtype="f32", config=CONFIG).named_tensors()
    for quantize in (None, "nf4"):
        model = FluxTransformer.from_pretrained(path, dtype="f32", config=CONFIG, quantize=quantize)
        for name, tensor in model.named_tensors().items():
            np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize("form", [*FORMS, "nf4", "plain nf4", "mixed"])
def test_facts_name_the_format_of_the_codes_unless_a_weight_has_none(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    shutil.copy(CONFIG, tmp_path)
    if form in FORMS:
        tensors, _ = golden_in_fp8(form)
        write(path, tensors, metadata_of(form, tensors))
    else:
        pack = packed if form == "nf4" else with_plain_scales
        tensors = {}
        for name, tensor in tc.load_file(GOLDEN / path.name).items():
            value = tensor.to("f32").numpy()
            is_left_plain = form == "mixed" and "single_transformer_blocks.0.proj_out" in name
            if value.ndim == 2 and "transformer_blocks." in name and not is_left_plain:
                tensors |= pack(name, value)[0]
            else:
                tensors[name] = ("F32", value.shape, value.tobytes())
        write(path, tensors)
    (facts,) = tc.inspect(tmp_path).parts.values()
    expected = {"mixed": None, "nf4": "nf4", "plain nf4": "nf4"}.get(form, "fp8")
    assert facts.stored_format == expected
    if expected == "nf4":
        # A quantized matrix takes half a byte for each element, and the bytes of its scales.
        layers = [name for name in facts.layers if "transformer_blocks." in name]
        widths = {"U8": 1, "F32": 4}
        bytes_of_scales = sum(
            int(np.prod(dims)) * widths[dtype]
            for key, (dtype, dims, _) in tensors.items()
            if key.endswith((".absmax", ".nested_absmax"))
        )
        elements = sum(int(np.prod(facts.layers[name])) for name in layers)
        # Each other element is loaded as bf16, in two bytes.
        expected_bytes = 2 * (facts.elements - elements) + elements // 2 + bytes_of_scales
        assert facts.weight_bytes("bf16", "nf4") == expected_bytes


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({"quant_method": "gptq"}, '"gptq"'),
        # Neither `load_in_4bit` nor `load_in_8bit`: the type alone says nothing.
        ({"load_in_4bit": False}, r'"bitsandbytes" \(nf4\)'),
        ({"bnb_4bit_quant_type": "fp4"}, r'"bitsandbytes" \(fp4\)'),
        ({"bnb_4bit_quant_type": None}, r'"bitsandbytes" \(fp4\)'),  # fp4 is the default
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r'"compressed-tensors" \(pack-quantized\)',
        ),
    ],
    ids=["gptq", "not 4-bit", "fp4", "default type", "compressed-tensors"],
)
def test_unsupported_quantizations_are_errors(
    tmp_path: Path, changes: dict[str, Any], described: str
) -> None:
    write_folder_of_bitsandbytes(tmp_path, **changes)
    with pytest.raises(
        tc.errors.ConfigError, match=f"of {described} are .*load the unquantized weight"
    ):
        FluxTransformer.from_pretrained(tmp_path)
