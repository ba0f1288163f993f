"""Headers of weight files that are not what they should be."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.train.headers import read_folder, read_header, read_metadata


def write(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a": 3}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": 3}}',
        b'{"a": {"dtype": "F32", "shape": [Infinity]}}',
        b'{"a": {"dtype": "F32", "shape": [NaN]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"]}}',
        b'{"a": {"dtype": "F32", "shape": [[]]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b"]}}",
    ],
    ids=lambda header: header[:45].decode(errors="replace"),
)
def test_a_damaged_header_is_a_weights_format_error(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path / "a.safetensors", header)
    for read in (lambda: read_header(path), lambda: read_folder(tmp_path)):
        with pytest.raises(WeightsFormatError, match=r"a\.safetensors is no safetensors file"):
            read()


@pytest.mark.parametrize("texts", [3, "text", ["x"], [["a", "b"]]], ids=str)
def test_metadata_that_is_no_object_is_refused(tmp_path: Path, texts: Any) -> None:
    header = json.dumps({"__metadata__": texts}).encode()
    with pytest.raises(WeightsFormatError, match="__metadata__ is no object"):
        read_metadata(write(tmp_path / "a.safetensors", header))


def test_a_length_beyond_the_file_is_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", b"{}", 2**64 - 1)
    assert read_header(path) == {}
    path.write_bytes(b"\0\0\0")
    with pytest.raises(WeightsFormatError, match="no safetensors file"):
        read_header(path)
    with pytest.raises(MissingFileError):
        read_header(tmp_path / "none")
