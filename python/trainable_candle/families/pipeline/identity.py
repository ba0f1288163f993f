"""What latents and text features of a pipeline depend on, as names for caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data import file_identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_CONFIG: Final = "config.json"


def parts_identity(weights: Path, names: Sequence[str]) -> dict[str, str]:
    """Of parts of a checkpoint: their weights and configurations.

    Raises:
        OSError: a file cannot be read.
    """
    if weights.is_dir():
        return {name: file_identity(weights / name) for name in names}
    # Of one file, configurations are read from where its pipeline would have them.
    found = {"weights": file_identity(weights)}
    for name in names:
        config = weights.parent / name / _CONFIG
        found[name] = file_identity(config) if config.is_file() else ""
    return found


def tokenizers_identity(weights: Path, shipped: Mapping[str, Path]) -> dict[str, str]:
    """Of tokenizers: their folders, or where a checkpoint has none, what the package ships.

    Args:
        weights: the checkpoint.
        shipped: for each folder of a tokenizer, the package's.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        name: file_identity(folder if (folder := weights / name).is_dir() else ours)
        for name, ours in shipped.items()
    }
