"""A language model's folder with layers in four bits, as bitsandbytes stores them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import WeightsFormatError
from trainable_candle.export.merged import INDEX, shards
from trainable_candle.files import parse_json, write_atomically
from trainable_candle.nn.functional import fake_quantize

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from trainable_candle import Tensor

FORMATS: Final = ("nf4",)
_BLOCK: Final = 64
_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def quantize_folder(folder: Path, layers: Collection[str]) -> float:
    """Replace weights in a folder of transformers by NF4, which it loads with bitsandbytes.

    Scales stay in f32 (4.5 bits per weight), as those that `--qat nf4` trains with. Keys follow
    `QuantState.as_dict(packed=True)` and the configuration `BitsAndBytesConfig`:
    <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/95f9af309d4d5793847169c39288dcd3fcbdf564/bitsandbytes/functional.py>.

    Args:
        folder: holds `config.json` and the weights; its files are replaced.
        layers: the names of the linear layers.

    Returns:
        The relative error of the replaced weights: the length of the difference by theirs.

    Raises:
        MissingFileError, WeightsFormatError: a file is missing or damaged, or a layer is in none.
        NonFiniteError, ArgumentError: a weight is not a finite number.
        OSError: a file cannot be written.
    """
    left, error, length = set(layers), 0.0, 0.0
    places: dict[str, str] = {}
    for name in shards(folder):
        tensors: dict[str, Tensor] = {}
        for key, weight in tc.load_file(folder / name).items():
            layer = key.removesuffix(".weight")
            if layer not in left or layer == key:
                tensors[key] = weight
                continue
            left.remove(layer)
            tensors |= _parts(key, weight)
            exact = weight.to("f32")
            lost = (fake_quantize(exact, "nf4") - exact).numpy()
            error += float((lost.astype(np.float64) ** 2).sum())
            length += float((exact.numpy().astype(np.float64) ** 2).sum())
        tc.save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    if left:
        raise WeightsFormatError(f"weights: {folder} has no weight of {min(left)}")
    if (folder / INDEX).is_file():
        index = parse_json((folder / INDEX).read_text(encoding="utf-8"))
        write_atomically(folder / INDEX, json.dumps(index | {"weight_map": places}, indent=2))
    _configure(folder / "config.json")
    return math.sqrt(error / length) if length else 0.0


def _parts(key: str, weight: Tensor) -> dict[str, Tensor]:
    """The codes of a weight and what they need, under bitsandbytes' names."""
    rows, columns = weight.shape
    fake_quantize(weight, "nf4")  # an error that says what is wrong with its size
    exact = weight.to("f32")
    scales = np.abs(exact.numpy().reshape(-1, _BLOCK)).max(1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": _BLOCK,
        "dtype": _DTYPES[str(weight.dtype)],
        "shape": [rows, columns],
    }
    packed = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    return {
        key: tc.quantize(exact, "nf4").tensors()["codes"].reshape((-1, 1)),
        f"{key}.absmax": tc.tensor(scales),
        f"{key}.quant_map": tc.tensor(_values()),
        f"{key}.quant_state.bitsandbytes__nf4": tc.tensor(packed),
    }


def _values() -> np.ndarray[Any, np.dtype[np.float32]]:
    """The sixteen values of the codes: blocks whose scale is 1, rounded."""
    blocks = np.linspace(-1, 1, 64 * 63, dtype=np.float32).reshape(64, 63)
    blocks = np.concatenate([blocks, np.ones((64, 1), np.float32)], 1)
    return np.unique(fake_quantize(tc.tensor(blocks), "nf4").numpy())


def _configure(path: Path) -> None:
    """Say in the configuration how the weights are stored."""
    config = parse_json(path.read_text(encoding="utf-8"))
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }
    write_atomically(path, json.dumps(config, indent=2))
