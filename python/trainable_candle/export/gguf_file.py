"""Writes files in GGUF, the format of llama.cpp, tensor by tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle import QuantizedTensor, Tensor

_ALIGNMENT: Final = 32
"""Each tensor begins at a multiple of this many bytes."""
_U32, _I32, _FLOAT, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
"""The numbers that stand in files for the types of metadata."""
Fact = str | bool | int | float | list[Any]
"""A value of the metadata. An integer is stored as u32, but integers in a list as i32; floats are
stored as f32, and an empty list as a list of strings. The first value of a list decides its type.
"""


class Kind(NamedTuple):
    """How the values of a tensor are stored."""

    number: int
    """The number that stands for the kind in files."""
    block: int
    """The number of neighbouring elements of a row that are stored together, as a block."""
    size: int
    """The number of bytes of a block."""


KINDS: Final = {
    "f32": Kind(0, 1, 4),
    "f16": Kind(1, 1, 2),
    "q4_0": Kind(2, 32, 18),
    "q4_1": Kind(3, 32, 20),
    "q5_0": Kind(6, 32, 22),
    "q5_1": Kind(7, 32, 24),
    "q8_0": Kind(8, 32, 34),
    "q4_k": Kind(12, 256, 144),
    "q5_k": Kind(13, 256, 176),
    "q6_k": Kind(14, 256, 210),
    "bf16": Kind(30, 1, 2),
}
"""The kinds (number, block, size), by name: the name of a dtype, or of a format of `quantize`."""


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """The sizes in the order of PyTorch, the innermost dimension last."""
    kind: str
    """How the file stores the values; a key of `KINDS`."""
    values: Callable[[], Tensor | QuantizedTensor]
    """Called when the tensor is written; returns the values in any float dtype, or already
    quantized to `kind`."""


def write(file: BinaryIO, facts: Mapping[str, Fact], entries: Sequence[Entry]) -> None:
    """Write a complete file with the metadata `facts`. One tensor is in memory at a time.

    Raises:
        ConfigError: a tensor's rows do not consist of whole blocks of its kind, its values are not
            finite in f16, or `values` returns another number of bytes than shape and kind need.
        ArgumentError: values are not finite or too large for a kind with blocks.
        OSError: the file cannot be written.
    """
    version = 3
    head = [b"GGUF", struct.pack("<IQQ", version, len(entries), len(facts))]
    for key, value in facts.items():
        type_number, content = _fact(value)
        head += [_string(key), struct.pack("<I", type_number), content]
    offset = 0
    for entry in entries:
        # GGUF lists the sizes in the opposite order, the innermost dimension first.
        sizes = entry.shape[::-1]
        head += [_string(entry.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", KINDS[entry.kind].number, offset))
        offset += _padded(_size(entry))
    header = b"".join(head)
    file.write(header + bytes(_padded(len(header)) - len(header)))
    for entry in entries:
        size = _size(entry)
        content = _content(entry)
        if len(content) != size:
            raise ConfigError(f"export: {entry.name} has {len(content)} bytes, expected {size}")
        file.write(content)
        file.write(bytes(_padded(size) - size))


def _padded(size: int) -> int:
    """Return the least multiple of `_ALIGNMENT` that is not below `size`."""
    return size + -size % _ALIGNMENT


def _size(entry: Entry) -> int:
    """Return the number of bytes of a tensor.

    Raises:
        ConfigError: its rows do not consist of whole blocks.
    """
    kind, columns = KINDS[entry.kind], entry.shape[-1] if entry.shape else 1
    if columns % kind.block:
        raise ConfigError(
            f"export: {entry.name} has rows of {columns} elements, expected a multiple of "
            f"{kind.block} for {entry.kind}"
        )
    return int(np.prod(entry.shape)) // kind.block * kind.size


def _content(entry: Entry) -> bytes:
    """Return the bytes of a tensor.

    In these formats, the codes of a quantized tensor are whole blocks, which contain the scales.

    Raises:
        ConfigError, ArgumentError: its kind cannot represent a value.
    """
    values = entry.values()
    if not isinstance(values, tc.Tensor):
        return bytes(values.tensors()["codes"].numpy().tobytes())
    if KINDS[entry.kind].block > 1:
        return bytes(tc.quantize(values, entry.kind).tensors()["codes"].numpy().tobytes())
    if entry.kind == "bf16":
        # numpy has no bf16. A bf16 value is the upper half of the f32 value.
        rounded = values.to("bf16").to("f32").numpy()
        return bytes((np.ascontiguousarray(rounded).view("<u4") >> 16).astype("<u2").tobytes())
    content = values.to(entry.kind).numpy()
    if entry.kind == "f16" and not np.isfinite(content).all():
        raise ConfigError(
            f"export: {entry.name} has values that are not finite in f16; use bf16 or f32"
        )
    return bytes(np.ascontiguousarray(content).tobytes())


def _fact(value: Fact) -> tuple[int, bytes]:
    """Return the number that stands for the type of a value, and the bytes of the value."""
    # Test for bool before int, because a bool is also an int.
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _U32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _string(value)
    first = value[0] if value else ""
    count = struct.pack("<Q", len(value))
    if isinstance(first, str):
        return _ARRAY, struct.pack("<I", _STRING) + count + b"".join(map(_string, value))
    number, letter = (_FLOAT, "f") if isinstance(first, float) else (_I32, "i")
    return _ARRAY, struct.pack("<I", number) + count + struct.pack(f"<{len(value)}{letter}", *value)


def _string(text: str) -> bytes:
    """Return the number of a text's bytes in UTF-8, then these bytes."""
    content = text.encode()
    return struct.pack("<Q", len(content)) + content
