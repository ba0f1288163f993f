"""Reads SentencePiece models (`spiece.model`): protocol buffers with pieces and their scores."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
"""Field numbers of the message `ModelProto`."""
_TEXT, _SCORE, _TYPE = 1, 2, 3
"""Field numbers of a piece."""
_MODEL_TYPE, _UNIGRAM = 3, 1
"""The number of the trainer's field for the kind of model, and the field's value for a unigram
model."""
_CHARSMAP: Final = 2
"""The number of the normalizer's field for the table of characters."""
_NORMAL, _UNKNOWN = 1, 2
"""Types of pieces."""
_FLOAT: Final = struct.Struct("<f")
_MOST_BITS: Final = 70
"""A 64-bit integer takes at most ten bytes, each with seven of its bits."""
_VARINT, _64_BITS, _BYTES, _32_BITS = 0, 1, 2, 5
"""Wire types: the forms of fields' values."""


class UnigramModel(NamedTuple):
    """A unigram model: text is split into the pieces whose scores have the largest sum."""

    pieces: list[tuple[str, float]]
    """The pieces with their scores; a piece's number is its index."""
    unknown: int
    """The number of the piece for text that no piece covers."""
    charsmap: bytes
    """SentencePiece's compiled table that normalises characters before the split; may be empty."""


def parse(data: bytes) -> UnigramModel:
    """Return the model in `data`, the contents of a file.

    Raises:
        ValueError: the contents are not a unigram model.
    """
    try:
        return _parse(data)
    except (IndexError, struct.error) as error:
        raise ValueError("the SentencePiece model ends within a field") from error


def _parse(data: bytes) -> UnigramModel:
    pieces: list[tuple[str, float]] = []
    # A field that the file omits has SentencePiece's default: the type of the model is unigram, the
    # type of a piece is normal, and its score is 0. Every piece has a text.
    unknown, charsmap, kind = None, b"", _UNIGRAM
    for number, value in _fields(data):
        if number == _PIECE:
            fields = dict(_fields(value))
            if fields.get(_TYPE, _NORMAL) == _UNKNOWN:
                unknown = len(pieces)
            text = fields.get(_TEXT)
            if not isinstance(text, bytes):
                raise ValueError(f"piece {len(pieces)} of the SentencePiece model has no text")
            pieces.append((text.decode(), fields.get(_SCORE, 0.0)))
        elif number == _TRAINER:
            kind = dict(_fields(value)).get(_MODEL_TYPE, _UNIGRAM)
        elif number == _NORMALIZER:
            charsmap = dict(_fields(value)).get(_CHARSMAP, b"")
    if kind != _UNIGRAM:
        raise ValueError(f"the SentencePiece model is of type {kind}, expected {_UNIGRAM}, unigram")
    if unknown is None:
        raise ValueError("the SentencePiece model has no piece for unknown text")
    return UnigramModel(pieces, unknown, charsmap)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value (an integer, a float or bytes) of each field of a message.

    Raises:
        IndexError, struct.error: the message ends within a field.
        ValueError: a field has an unknown wire type, or an integer is too long.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        # A key is the number of the field times 8, plus the wire type.
        wire, start = key & 7, at
        value: int | float | bytes
        if wire == _VARINT:
            value, at = _varint(message, at)
        elif wire == _BYTES:
            length, start = _varint(message, at)
            at = start + length
            value = message[start:at]
        elif wire == _32_BITS:
            at += 4
            (value,) = _FLOAT.unpack_from(message, start)
        elif wire == _64_BITS:
            at += 8
            value = message[start:at]
        else:
            raise ValueError(f"found a field of wire type {wire}, which no SentencePiece model has")
        if at > end:
            raise IndexError
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at an offset, seven bits per byte, and the offset after it.

    Raises:
        IndexError: `data` ends within the integer.
        ValueError: the integer has more than ten bytes.
    """
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > _MOST_BITS:
            raise ValueError("found an integer of more than 64 bits in a SentencePiece model")
    return value, at + 1
