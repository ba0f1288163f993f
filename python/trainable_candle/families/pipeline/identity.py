"""Identities of the files that latents and text features depend on; caches are named by them."""

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
    """Return, for each part of a checkpoint, the identity of its weights and configuration.

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
        # For a part in a single file, `config.json` may be in a folder with the part's name,
        # beside the file.
        config = path.parent / name / _CONFIG
        beside = file_identity(config) if config.is_file() else ""
        found[name] = f"{file_identity(path)} {beside}"
    return found


def tokenizers_identity(weights: Path, shipped: Mapping[str, Path]) -> dict[str, str]:
    """Return, for each tokenizer, the identity of its folder, or else of the package's copy.

    Args:
        weights: the pipeline's folder or a single file.
        shipped: for the name of each tokenizer's folder, the tokenizer that the package ships.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        name: file_identity(folder if (folder := weights / name).is_dir() else ours)
        for name, ours in shipped.items()
    }
