"""Identities of the files that latents and text features depend on, for naming caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.data import file_identity
from trainable_candle.families.pipeline.facts import source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle.families.pipeline.facts import Facts

_CONFIG: Final = "config.json"


def parts_identity(facts: Facts, names: Sequence[str]) -> dict[str, str]:
    """The identity of parts of a checkpoint: their weights and configurations.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for name in names:
        path, subfolder = source(facts.parts[name].path, name).values()
        assert isinstance(path, Path)
        if path.is_dir():
            found[name] = file_identity(path / str(subfolder) if subfolder else path)
            continue
        # A part that is a file may have its configuration in a folder beside it, as in a pipeline.
        config = path.parent / name / _CONFIG
        beside = file_identity(config) if config.is_file() else ""
        found[name] = f"{file_identity(path)} {beside}"
    return found


def tokenizers_identity(weights: Path, shipped: Mapping[str, Path]) -> dict[str, str]:
    """The identity of tokenizers: of their folders or, without one, of the package's files.

    Args:
        weights: the checkpoint.
        shipped: maps the name of each tokenizer's folder to the package's tokenizer.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        name: file_identity(folder if (folder := weights / name).is_dir() else ours)
        for name, ours in shipped.items()
    }
