"""Files of the cache of encoded images and captions.

An entry of the cache is a safetensors file with a checksum, so that damage is detected.

The facts of a file are texts by name, such as the entry's key, in the part `__metadata__` of the
file's header.
"""

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
"""The start of every header. The checksum follows, in 8 hexadecimal digits."""
_PLACE: Final = slice(8 + len(_START), 16 + len(_START))
"""The bytes of the checksum in a file. The header begins at byte 8, after its length."""
_ALIGNMENT: Final = 8
"""Spaces extend the header so that its length is a multiple of this."""
_DTYPES: Final = {
    "f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64", "u32": "U32", "u8": "U8"
}  # fmt: skip
"""The names that safetensors gives to the library's dtypes."""

_NUMPY: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U32": "<u4", "U8": "u1"}
"""numpy's dtypes for the names of safetensors; numpy has none for BF16."""


def packed(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with a checksum.

    Args:
        tensors: the tensors, by name.
        facts: the facts of the file, to which the checksum is added.
    """
    # Tensors with the largest elements come first, so that each tensor begins at a multiple of its
    # element size.
    order = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    infos: dict[str, Any] = {}
    parts, end = [], 0
    for name, tensor in order:
        part = _bytes(tensor)
        dtype, shape = _DTYPES[str(tensor.dtype)], list(tensor.shape)
        infos[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(part)]}
        parts.append(part)
        end += len(part)
    data = b"".join(parts)
    # A fact can be a file name, which may have bytes that are not UTF-8. Python represents such
    # bytes by surrogates, which become question marks here.
    texts = {name: text.encode(errors="replace").decode() for name, text in facts.items()}
    metadata = {_CHECKSUM: "0" * 8, **texts}
    header = json.dumps({_METADATA: metadata, **infos}).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    content = bytearray(len(header).to_bytes(8, "little") + header + data)
    content[_PLACE] = _checksum(content)
    return bytes(content)


def unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the facts of a `packed` file, without comparing the checksum."""
    start = 8 + int.from_bytes(content[:8], "little")
    infos = json.loads(content[8:start])
    facts = infos.pop(_METADATA)
    tensors = {}
    for name, info in infos.items():
        begin, end = (start + offset for offset in info["data_offsets"])
        tensors[name] = _tensor(content[begin:end], info["dtype"]).reshape(info["shape"])
    return tensors, facts


def facts_of(path: Path) -> dict[str, str]:
    """Return the facts of a file; reads only the header, and does not compare the checksum.

    The facts are empty if the file cannot be read or has no valid header.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # In a damaged file, the length may be any number.
            return _header_facts(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError):
        return {}


def intact_facts(path: Path) -> dict[str, str]:
    """Return the facts of a file that `packed` made; reads all of it, and compares the checksum.

    The facts are empty if the file cannot be read, `packed` did not make it, or it is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    if content[8 : _PLACE.start] != _START or content[_PLACE] != _checksum(content):
        return {}
    return _header_facts(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _header_facts(header: bytes) -> dict[str, str]:
    fields = parse_json(header)
    facts = fields.get(_METADATA) if isinstance(fields, dict) else None
    return facts if isinstance(facts, dict) else {}


def _checksum(content: bytes | bytearray) -> bytes:
    """Return the CRC-32 of all bytes of a file except the checksum, in 8 hexadecimal digits."""
    view = memoryview(content)
    return b"%08x" % zlib.crc32(view[_PLACE.stop :], zlib.crc32(view[: _PLACE.start]))


def _tensor(values: bytes, dtype: str) -> Tensor:
    if dtype == "BF16":
        # numpy has no bf16. A bf16 value is the upper half of the f32 value.
        bits = np.frombuffer(values, "<u2").astype(np.uint32) << 16
        return tc.tensor(bits.view(np.float32)).to("bf16")
    return tc.tensor(np.frombuffer(values, _NUMPY[dtype]))


def _bytes(tensor: Tensor) -> bytes:
    if str(tensor.dtype) == "bf16":
        halves: bytes = (tensor.to("f32").numpy().view(np.uint32) >> 16).astype("<u2").tobytes()
        return halves
    values: bytes = tensor.numpy().tobytes()
    return values
