"""What SDXL's latents and text features depend on in a checkpoint, as names for caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.data import file_identity
from trainable_candle.families.sdxl.files import TEXT_ENCODERS
from trainable_candle.text.clip_tokenizer import SHIPPED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_CONFIG: Final = "config.json"
_TOKENIZERS: Final = ("tokenizer", "tokenizer_2")


def latents_identity(weights: Path) -> Mapping[str, str]:
    """Of the autoencoder: its weights and its configuration.

    Raises:
        OSError: a file cannot be read.
    """
    return _parts(weights, ("vae",))


def text_identity(weights: Path) -> Mapping[str, str]:
    """Of the text encoders and the tokenizers: weights, configurations, vocabularies.

    Raises:
        OSError: a file cannot be read.
    """
    tokenizers = {
        name: file_identity(folder if (folder := weights / name).is_dir() else SHIPPED)
        for name in _TOKENIZERS
    }
    return {**_parts(weights, TEXT_ENCODERS), **tokenizers}


def _parts(weights: Path, names: Sequence[str]) -> dict[str, str]:
    if weights.is_dir():
        return {name: file_identity(weights / name) for name in names}
    # Of one file, configurations are read from where its pipeline would have them.
    found = {"weights": file_identity(weights)}
    for name in names:
        config = weights.parent / name / _CONFIG
        found[name] = file_identity(config) if config.is_file() else ""
    return found
