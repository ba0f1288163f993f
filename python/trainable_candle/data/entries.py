"""Entries of a cache: safetensors files with a checksum, so that a damaged one is known as such."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle import Tensor

_METADATA: Final = "__metadata__"
_CHECKSUM: Final = "crc32"
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "u32": "U32", "u8": "U8"
}  # fmt: skip


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """A safetensors file of some tensors.

    Args:
        tensors: by name.
        facts: text entries of the header, to which the checksum is added.
    """
    # The widest first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    entries: dict[str, Any] = {}
    parts, end = [], 0
    for name, tensor in order:
        part = _bytes(tensor)
        dtype, shape = _DTYPES[str(tensor.dtype)], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(part)]}
        parts.append(part)
        end += len(part)
    data = b"".join(parts)
    # Names of files may hold bytes that are no text.
    texts = {name: text.encode(errors="replace").decode() for name, text in facts.items()}
    metadata = {**texts, _CHECKSUM: _checksum(entries, data)}
    header = json.dumps({_METADATA: metadata, **entries}).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header + data


def facts_of(path: Path) -> dict[str, str]:
    """The text entries of a file; none if it is missing, or no safetensors file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return _metadata(json.loads(file.read(min(length, path.stat().st_size))))
    except (OSError, ValueError):
        return {}


def intact_facts(path: Path) -> dict[str, str]:
    """The text entries of a file that is as `packed` made it, read in full; else none."""
    try:
        content = memoryview(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(bytes(content[8 : 8 + length]))
    except (OSError, ValueError):
        return {}
    metadata = _metadata(entries)
    if not metadata:
        return {}
    del entries[_METADATA]
    same = metadata.get(_CHECKSUM) == _checksum(entries, content[8 + length :])
    return metadata if same else {}


def _metadata(entries: Any) -> dict[str, str]:
    found = entries.get(_METADATA) if isinstance(entries, dict) else None
    return found if isinstance(found, dict) else {}


def _checksum(entries: Mapping[str, Any], data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data, zlib.crc32(json.dumps(entries, sort_keys=True).encode())):08x}"


def _bytes(tensor: Tensor) -> bytes:
    if str(tensor.dtype) == "bf16":
        # numpy has none; it is the upper half of f32.
        halves: bytes = (tensor.to("f32").numpy().view(np.uint32) >> 16).astype("<u2").tobytes()
        return halves
    whole: bytes = tensor.numpy().tobytes()
    return whole
