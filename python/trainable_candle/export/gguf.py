"""LoRA adapters in llama.cpp's file format.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3. The names and the
order of the rows are those of llama.cpp's converter (`convert_lora_to_gguf.py` and
`convert_hf_to_gguf.py` at 0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trainable_candle.errors import ConfigError
from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle.export.adapter import TextAdapter

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`model_type` of transformers -> the architecture's name in GGUF."""
_NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ALIGNMENT: Final = 32
_FLOAT, _STRING = 6, 8
_F32: Final = 0


def write_adapter(path: Path, adapter: TextAdapter, config: Mapping[str, Any]) -> None:
    """Write an adapter.

    Args:
        path: of the file.
        adapter: the adapter, without DoRA.
        config: the model's `config.json`.

    Raises:
        ConfigError: llama.cpp does not know the model, or a layer.
        OSError: the file cannot be written.
    """
    family = str(config.get("model_type"))
    if family not in ARCHITECTURES:
        raise ConfigError(f"export: llama.cpp's name of the architecture `{family}` is not known")
    architecture = ARCHITECTURES[family]
    tensors = {}
    for layer, factors in adapter.filled().items():
        name = _name(layer)
        up = factors.up
        if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
            up = _paired(up, _heads(config, name))
        tensors[f"{name}.weight.lora_a"] = factors.down
        tensors[f"{name}.weight.lora_b"] = up
    facts: dict[str, str | float] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        # The scale is this divided by the rank, so 1.
        "adapter.lora.alpha": float(adapter.rank),
    }
    write_atomically(path, encoded(facts, tensors))


def _name(layer: str) -> str:
    match = _LAYER.fullmatch(layer)
    if not match or match[2] not in _NAMES:
        raise ConfigError(f"export: llama.cpp has no name for the layer {layer}")
    return f"blk.{match[1]}.{_NAMES[match[2]]}"


def _heads(config: Mapping[str, Any], name: str) -> int:
    heads = int(config["num_attention_heads"])
    if name.endswith("attn_q"):
        return heads
    return int(config.get("num_key_value_heads") or heads)


def _paired(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys in llama.cpp's order.

    Features turn with their neighbour there, and with the one half a head further on here.
    """
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def encoded(
    facts: Mapping[str, str | float], tensors: Mapping[str, npt.NDArray[np.float32]]
) -> bytes:
    """A whole file of f32 tensors."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(facts))]
    for key, value in facts.items():
        head.append(_string(key))
        if isinstance(value, str):
            head += [struct.pack("<I", _STRING), _string(value)]
        else:
            head.append(struct.pack("<If", _FLOAT, value))
    data, offset = [], 0
    for name, tensor in tensors.items():
        # Sizes stand in the opposite order, that of the fastest dimension first.
        sizes = tensor.shape[::-1]
        head += [_string(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", _F32, offset))
        content = np.ascontiguousarray(tensor, "<f4").tobytes()
        content += bytes(-len(content) % _ALIGNMENT)
        data.append(content)
        offset += len(content)
    start = b"".join(head)
    return b"".join([start, bytes(-len(start) % _ALIGNMENT), *data])


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content
