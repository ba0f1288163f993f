"""Quantizes linear layers in a language model's folder, in formats that transformers loads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import NonFiniteError, WeightsFormatError
from trainable_candle.export.merged import CONFIG, INDEX, QUANTIZATION, shards
from trainable_candle.files import read_object, write_atomically
from trainable_candle.nn.functional import fake_quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from trainable_candle import Tensor

_BLOCK: Final = 64
"""The number of elements that share a scale in NF4."""
_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""The name of a dtype -> its name in PyTorch."""


def quantize_folder(
    folder: Path, layers: Collection[str], to: str, factors: Mapping[str, Tensor] | None = None
) -> float:
    """Replace the weights of linear layers in a model's folder by quantized ones.

    - `"nf4"`: bitsandbytes, with scales in f32 (4 bits a weight and 32 for each 64 weights, which
      makes 4.5) and the rounding of training with `--qat nf4`. The keys follow
      `QuantState.as_dict(packed=True)`; the configuration follows `BitsAndBytesConfig`:
      <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/functional.py>.
    - `"int8"`: bitsandbytes (`Linear8bitLt`); `SCB` holds the scale of each row times 127: without
      `factors`, the row's largest magnitude.
    - `"fp8"`: compressed-tensors, e4m3 numbers with a scale for each row; the activations are not
      quantized:
      <https://github.com/vllm-project/compressed-tensors>.

    Args:
        folder: the folder with `config.json` and the weights; its files are replaced.
        layers: the names of the linear layers.
        to: one of `FORMATS`.
        factors: for layers with learned factors, by name, one factor for each scale; it multiplies
            the scale.

    Returns:
        The relative error of the replaced weights: the norm of the error divided by the norm
        of the weights.

    Raises:
        MissingFileError, WeightsFormatError: a file is missing or damaged, the weights are already
            quantized, or no file has the weight of a layer.
        ShapeError: an nf4 weight does not consist of blocks of 64 elements, or the number of a
            layer's factors is not the number of its scales.
        NonFiniteError: a weight has values that are not finite.
        OSError: a file cannot be written.
    """
    remaining, squared_error, squared_norm = set(layers), 0.0, 0.0
    weight_map: dict[str, str] = {}
    form = _FORMS[to]
    for name in shards(folder):
        tensors: dict[str, Tensor] = {}
        code_dtypes: dict[str, str] = {}
        for key, weight in tc.load_file(folder / name).items():
            layer = key.removesuffix(".weight")
            # `layer == key` if the key does not end in `.weight`.
            if layer not in remaining or layer == key:
                tensors[key] = weight
                continue
            remaining.remove(layer)
            exact = weight.to("f32")
            if not np.isfinite(exact.numpy()).all():
                raise NonFiniteError(
                    f"weights: {key} in {folder / name} has values that are not finite; is the "
                    "file or the adapter damaged?"
                )
            learned = (factors or {}).get(layer)
            rounded = fake_quantize(exact, to, learned)
            matrix = _matrix(exact, rounded, form, learned, _DTYPES[str(weight.dtype)])
            tensors |= form.parts(key, matrix)
            if to in _CODE_DTYPES:
                code_dtypes[key] = to
            error = (rounded - exact).numpy()
            squared_error += float((error.astype(np.float64) ** 2).sum())
            squared_norm += float((exact.numpy().astype(np.float64) ** 2).sum())
        tc.save_file(tensors, folder / name, {"format": "pt"}, code_dtypes)
        weight_map |= dict.fromkeys(tensors, name)
    if remaining:
        raise WeightsFormatError(f"weights: {folder} has no weight of {min(remaining)}")
    if (folder / INDEX).is_file():
        index = read_object(folder / INDEX)
        write_atomically(folder / INDEX, json.dumps(index | {"weight_map": weight_map}, indent=2))
    path = folder / CONFIG
    config = read_object(path)
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    config[QUANTIZATION] = form.configuration(dtype)
    write_atomically(path, json.dumps(config, indent=2))
    return math.sqrt(squared_error / squared_norm) if squared_norm else 0.0


_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True)
class _Matrix:
    """A weight rounded to a format, as ratios times scales."""

    ratios: _Floats
    """The rounded values divided by their scales, [number of scales, elements per scale]."""
    scales: _Floats
    """[number of scales]."""
    shape: tuple[int, ...]
    """The weight's shape: [rows, columns]."""
    dtype: str
    """The weight's dtype before rounding, by its name in PyTorch."""


def _matrix(
    exact: Tensor, rounded: Tensor, form: _Form, factors: Tensor | None, dtype: str
) -> _Matrix:
    """Split a rounded weight into ratios and scales.

    Args:
        exact: the weight before rounding.
        rounded: the result of `fake_quantize` for `exact` and `factors`.
        form: the format.
        factors: what multiplies the scales, one factor for each.
        dtype: the weight's dtype in its file, by its name in PyTorch.
    """
    width = form.group or exact.shape[-1]
    scales = np.abs(exact.numpy().reshape(-1, width)).max(1) / np.float32(form.largest)
    # As `fake_quantize` does; groups of zeros may have any scale.
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    if factors is not None:
        scales = scales * factors.numpy()
    ratios = rounded.numpy().reshape(-1, width) / scales[:, None]
    return _Matrix(ratios, scales, tuple(exact.shape), dtype)


@dataclass(frozen=True)
class _Form:
    """How weights in a format are stored."""

    group: int | None
    """The number of elements that share a scale; None: all elements of a row."""
    largest: float
    """The scale of a group is the largest magnitude in the group, divided by this number."""
    parts: Callable[[str, _Matrix], dict[str, Tensor]]
    """Takes a weight's key and the rounded weight; returns the tensors to store by their keys, with
    the codes under the weight's key."""
    configuration: Callable[[str], dict[str, object]]
    """Takes the name of the dtype to compute in; returns the `quantization_config` of
    `config.json`."""


# `_nf4`, `_int8` and `_fp8` return the tensors to store for a weight; see `_Form.parts`.


def _nf4(key: str, matrix: _Matrix) -> dict[str, Tensor]:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": _BLOCK,
        "dtype": matrix.dtype,
        "shape": list(matrix.shape),
    }
    packed = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    values = _nf4_values()
    # The code of a ratio is the index of the nearest value: the number of midpoints below it.
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, matrix.ratios).astype(np.uint8)
    pairs = codes.reshape(-1, 2)  # A byte holds two codes, the first in its upper bits.
    return {
        key: tc.tensor(pairs[:, :1] << 4 | pairs[:, 1:]),
        # bitsandbytes multiplies NF4's values by `absmax`. NF4's largest value is 1, so without
        # learned factors a scale is the largest magnitude in its block.
        f"{key}.absmax": tc.tensor(matrix.scales),
        f"{key}.quant_map": tc.tensor(values),
        f"{key}.quant_state.bitsandbytes__nf4": tc.tensor(packed),
    }


def _int8(key: str, matrix: _Matrix) -> dict[str, Tensor]:
    prefix = key.removesuffix("weight")  # the layer's name and a dot
    return {
        key: _codes(matrix, "int8"),
        f"{prefix}SCB": tc.tensor(matrix.scales * np.float32(_FORMS["int8"].largest)),
        # 0 is bitsandbytes' code of the row-major format.
        f"{prefix}weight_format": tc.tensor(np.array(0, np.uint8)),
    }


def _fp8(key: str, matrix: _Matrix) -> dict[str, Tensor]:
    return {key: _codes(matrix, "fp8"), f"{key}_scale": tc.tensor(matrix.scales[:, None])}


def _codes(matrix: _Matrix, to: str) -> Tensor:
    """Return the 8-bit codes of the ratios, [rows, columns].

    `quantize` divides by the scale of a row. An added column of the largest value makes each scale
    1, so that `quantize` only encodes the ratios; the result omits the column.
    """
    rows, columns = matrix.shape
    largest = np.full((rows, 1), _FORMS[to].largest, np.float32)
    extended = tc.tensor(np.concatenate([matrix.ratios, largest], 1))
    codes = tc.quantize(extended, to).tensors()["codes"]
    return tc.tensor(codes.numpy().reshape(rows, columns + 1)[:, :-1].copy())


def _nf4_values() -> _Floats:
    """Return the sixteen values of NF4 in ascending order, found by rounding numbers."""
    # 64 blocks of 63 numbers between -1 and 1 are dense enough to be rounded to every value.
    count = 64
    numbers = np.linspace(-1, 1, count * (_BLOCK - 1), dtype=np.float32).reshape(count, _BLOCK - 1)
    # The last number of each block is 1, so that the scale of the block is 1.
    blocks = np.concatenate([numbers, np.ones((count, 1), np.float32)], 1)
    return np.unique(fake_quantize(tc.tensor(blocks), "nf4").numpy())


def _nf4_configuration(dtype: str) -> dict[str, object]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }


def _int8_configuration(_dtype: str) -> dict[str, object]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_skip_modules": ["lm_head"],
    }


def _fp8_configuration(_dtype: str) -> dict[str, object]:
    weights = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_FORMS: Final[dict[str, _Form]] = {
    "nf4": _Form(group=_BLOCK, largest=1, parts=_nf4, configuration=_nf4_configuration),
    "int8": _Form(group=None, largest=127, parts=_int8, configuration=_int8_configuration),
    # 448 is the largest number of e4m3.
    "fp8": _Form(group=None, largest=448, parts=_fp8, configuration=_fp8_configuration),
}
_CODE_DTYPES: Final = ("int8", "fp8")
"""The formats whose codes have, in the file, a dtype of the format's name; those of nf4 are u8."""
FORMATS: Final = tuple(_FORMS)
"""The formats of `quantize_folder`."""
