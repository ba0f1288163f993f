"""What tensors a checkpoint holds, read from the headers of its files alone."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ITEM_BYTES: Final = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element by the name of its dtype."""
_METADATA: Final = "__metadata__"
_MAX_HEADER: Final = 100_000_000


@dataclass(frozen=True)
class TensorFacts:
    """A tensor in a file."""

    dtype: str
    """As safetensors writes it: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorFacts]:
    """The tensors of a safetensors file by name; their values are not read.

    Raises:
        MissingFileError: there is no such file.
        WeightsFormatError: it is no safetensors file.
        OSError: it cannot be read.
    """
    try:
        return {
            name: TensorFacts(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in _entries(path).items()
            if name != _METADATA
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise WeightsFormatError(f"weights: {path} is no safetensors file: {error}") from None


def read_metadata(path: Path) -> dict[str, str]:
    """The text entries in the header of a safetensors file.

    Raises:
        MissingFileError, WeightsFormatError, OSError: as for `read_header`.
    """
    texts = _entries(path).get(_METADATA) or {}
    if not isinstance(texts, dict):
        raise WeightsFormatError(
            f"weights: {path} is no safetensors file: its {_METADATA} is no object"
        )
    return texts


def _entries(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = parse_json(file.read(min(length, _MAX_HEADER)))
    except FileNotFoundError:
        raise MissingFileError(f"weights: there is no file {path}") from None
    except (ValueError, struct.error) as error:
        raise WeightsFormatError(f"weights: {path} is no safetensors file: {error}") from None
    if not isinstance(entries, dict):
        raise WeightsFormatError(f"weights: {path} is no safetensors file: its header is no object")
    return entries


def read_folder(folder: Path, *, prefer: str | None = None) -> dict[str, TensorFacts]:
    """The tensors of all safetensors files in a folder by name.

    Args:
        folder: of one model, in one file or in several.
        prefer: of files of the same tensors in several precisions, those with this in their name
            (`fp16`); otherwise those without.

    Raises:
        MissingFileError: the folder holds no such file.
        WeightsFormatError: a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    wanted = [path for path in files if (".fp16." in path.name) == (prefer == "fp16")] or files
    if not wanted:
        raise MissingFileError(f"weights: there is no .safetensors file in {folder}")
    return {name: facts for path in wanted for name, facts in read_header(path).items()}


def total_bytes(tensors: Iterable[TensorFacts], dtype: str) -> int:
    """What the tensors take up when they are held as `dtype`."""
    return sum(facts.numel for facts in tensors) * ITEM_BYTES[dtype]
