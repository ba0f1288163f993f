"""LoRA adapters in llama.cpp's file format.

The names of tensors, and the order of the rows of query and key weights, are those of llama.cpp's
converter (`convert_lora_to_gguf.py` and `convert_hf_to_gguf.py` at
0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c).
"""

from __future__ import annotations

import re
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.export.gguf_file import Entry, Fact, write
from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle.export.adapter import TextAdapter

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`model_type` in transformers' `config.json` -> the architecture's name in GGUF."""
NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""transformers' name of a layer in a block -> the layer's name in GGUF."""
LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
"""The name of a layer in transformers; the groups are the index of its block and its name there."""


def write_adapter(path: Path, adapter: TextAdapter, config: Mapping[str, Any]) -> None:
    """Write a LoRA adapter.

    Args:
        path: the file to write.
        adapter: the adapter, without magnitudes (DoRA).
        config: the model's `config.json`.

    Raises:
        ConfigError: llama.cpp's name of the model's architecture or of a layer is not known.
        OSError: the file cannot be written.
    """
    architecture_name = architecture(config)
    tensors = {}
    # `filled` pads all factors with zeros to one rank, because the file has one alpha for all.
    for layer, factors in adapter.filled().items():
        name = _name(layer)
        up = factors.up
        # `up` has the rows of the layer's weight. Only for the architecture llama, the converter
        # reorders the rows of query and key weights.
        if architecture_name == "llama" and name.endswith(("attn_q", "attn_k")):
            up = paired(up, heads(config, name))
        tensors[f"{name}.weight.lora_a"] = factors.down
        tensors[f"{name}.weight.lora_b"] = up
    metadata: dict[str, Fact] = {
        "general.architecture": architecture_name,
        "general.type": "adapter",
        "adapter.type": "lora",
        # llama.cpp multiplies by alpha / rank. This must be 1, because `up` is already multiplied
        # by the adapter's scale.
        "adapter.lora.alpha": float(adapter.rank),
    }
    entries = [
        Entry(name, factor.shape, "f32", partial(tc.tensor, np.ascontiguousarray(factor)))
        for name, factor in tensors.items()
    ]
    content = BytesIO()
    write(content, metadata, entries)
    write_atomically(path, content.getvalue())


def architecture(config: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the architecture of the model with this `config.json`.

    Raises:
        ConfigError: llama.cpp's name of the architecture is not known.
    """
    model_type = str(config.get("model_type", ""))
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"export: llama.cpp's name of the architecture `{model_type}` is not known; expected "
            f"one of {', '.join(ARCHITECTURES)} as model_type in config.json"
        )
    return ARCHITECTURES[model_type]


def _name(layer: str) -> str:
    """Return llama.cpp's name of a layer.

    Raises:
        ConfigError: it is not known.
    """
    match = LAYER.fullmatch(layer)
    if not match or match[2] not in NAMES:
        raise ConfigError(f"export: llama.cpp has no name for the layer {layer}")
    return f"blk.{match[1]}.{NAMES[match[2]]}"


def heads(config: Mapping[str, Any], name: str) -> int:
    """Return the number of heads of a layer that computes queries or keys.

    Args:
        config: the model's `config.json`.
        name: llama.cpp's name of the layer.
    """
    queries = int(config["num_attention_heads"])
    if name.endswith("attn_q"):
        return queries
    return int(config.get("num_key_value_heads") or queries)


def paired(rows: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    """Return the rows of a query or key weight with `count` heads in llama.cpp's order.

    The rotary embedding rotates pairs of features of a head: llama.cpp pairs neighbouring features,
    transformers pairs features that are half a head apart.
    """
    halves = rows.reshape(count, 2, rows.shape[0] // count // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
