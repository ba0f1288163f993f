"""Entries of a cache: safetensors files with a checksum, so that damage is detected."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle import Tensor

_METADATA: Final = "__metadata__"
_CHECKSUM: Final = "crc32"
_START: Final = f'{{"{_METADATA}": {{"{_CHECKSUM}": "'.encode()
"""The start of every header. Then comes the checksum, 8 hexadecimal digits."""
_PLACE: Final = slice(8 + len(_START), 16 + len(_START))
"""Where a file has the checksum. The header begins at byte 8."""
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "u32": "U32", "u8": "U8"
}  # fmt: skip

_NUMPY: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U32": "<u4", "U8": "u1"}


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with a checksum.

    Args:
        tensors: the tensors, by name.
        facts: text entries of the header, to which the checksum is added.
    """
    # Tensors with the widest elements come first, so that each begins at a multiple of its element
    # size.
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
    # A file name can have bytes that are not UTF-8. Python represents such bytes by surrogates,
    # which become question marks here.
    texts = {name: text.encode(errors="replace").decode() for name, text in facts.items()}
    metadata = {_CHECKSUM: "0" * 8, **texts}
    header = json.dumps({_METADATA: metadata, **entries}).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    content = bytearray(len(header).to_bytes(8, "little") + header + data)
    content[_PLACE] = _checksum(content)
    return bytes(content)


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the text entries of a `packed` file; ignores the checksum."""
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    facts = entries.pop(_METADATA)
    tensors = {}
    for name, entry in entries.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        tensors[name] = _tensor(content[first:last], entry["dtype"]).reshape(entry["shape"])
    return tensors, facts


def facts_of(path: Path) -> dict[str, str]:
    """Return the text entries of a file's header, without a check of the tensors.

    They are empty if the file is missing or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return _metadata(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError):
        return {}


def intact_facts(path: Path) -> dict[str, str]:
    """Return the text entries of a file that `packed` made; empty if the file's checksum is wrong.

    The whole file is read.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    if content[8 : _PLACE.start] != _START or content[_PLACE] != _checksum(content):
        return {}
    return _metadata(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _metadata(header: bytes) -> dict[str, str]:
    entries = parse_json(header)
    found = entries.get(_METADATA) if isinstance(entries, dict) else None
    return found if isinstance(found, dict) else {}


def _checksum(content: bytes | bytearray) -> bytes:
    """Return the CRC-32 of all bytes of a file except the checksum, in 8 hexadecimal digits."""
    view = memoryview(content)
    return b"%08x" % zlib.crc32(view[_PLACE.stop :], zlib.crc32(view[: _PLACE.start]))


def _tensor(values: bytes, dtype: str) -> Tensor:
    if dtype == "BF16":
        halves = np.frombuffer(values, "<u2").astype(np.uint32) << 16
        return tc.tensor(halves.view(np.float32)).to("bf16")
    return tc.tensor(np.frombuffer(values, _NUMPY[dtype]))


def _bytes(tensor: Tensor) -> bytes:
    if str(tensor.dtype) == "bf16":
        # numpy has no bf16. A bf16 value is the upper half of the f32 value.
        halves: bytes = (tensor.to("f32").numpy().view(np.uint32) >> 16).astype("<u2").tobytes()
        return halves
    whole: bytes = tensor.numpy().tobytes()
    return whole
