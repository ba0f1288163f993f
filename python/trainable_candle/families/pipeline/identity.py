"""Identities of the files that latents and text features depend on; caches are named by them.

An identity is a hash of every byte of a file or of a model's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data import file_identity
from trainable_candle.families.pipeline.facts import source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle.families.pipeline.facts import Facts

_CONFIG: Final = "config.json"


def parts_identity(facts: Facts, names: Sequence[str]) -> dict[str, str]:
    """Return, for each part of a checkpoint, the identity of its weights and configuration.

    Raises:
        OSError: a file cannot be read.
    """
    identities = {}
    for name in names:
        # `path` is the pipeline's folder or file, or the part's own folder; for the latter,
        # `subfolder` is None.
        where = source(facts.parts[name].path, name)
        path, subfolder = where["path"], where["subfolder"]
        if path.is_dir():
            identities[name] = file_identity(path / subfolder if subfolder else path)
            continue
        # The `config.json` of a part in a single file may be in the folder of the part's name, next
        # to the file.
        config = path.parent / name / _CONFIG
        of_config = file_identity(config) if config.is_file() else ""
        identities[name] = f"{file_identity(path)} {of_config}"
    return identities


def tokenizers_identity(weights: Path, shipped: Mapping[str, Path]) -> dict[str, str]:
    """Return the identity of each tokenizer's folder, or of the package's copy if there is none.

    Args:
        weights: the pipeline's folder or a single file.
        shipped: the package's copy of each tokenizer, by the name of the tokenizer's folder.

    Raises:
        OSError: a file cannot be read.
    """
    return {
        name: file_identity(folder if (folder := weights / name).is_dir() else package_copy)
        for name, package_copy in shipped.items()
    }
