"""The tokenizers of pipelines' CLIP text encoders, and the width of an encoder's pooled output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text import CLIPTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.models import CLIPTextModel

_EMBEDDING: Final = "text_model.embeddings.token_embedding.weight"
"""The weight that has a row for each token."""


def pooled_width(config: Mapping[str, Any]) -> int:
    """Return the number of pooled features of a CLIP encoder with this configuration."""
    projects = config["architectures"] == ["CLIPTextModelWithProjection"]
    return int(config["projection_dim"] if projects else config["hidden_size"])


def clip_tokenizer(weights: Path, name: str, pad: str, model: CLIPTextModel) -> CLIPTokenizer:
    """Return the tokenizer of a CLIP text encoder in a pipeline.

    If the pipeline has no such tokenizer, or the weights are an original checkpoint, this is the
    CLIP tokenizer that the package ships.

    Args:
        weights: the pipeline's folder, or an original checkpoint's file.
        name: the name of the tokenizer's folder within the pipeline's folder.
        pad: the padding token, if the tokenizer is the one that the package ships.
        model: the text encoder that reads the tokens.

    Raises:
        MissingFileError: the tokenizer's folder lacks a file.
        WeightsFormatError: a file of the tokenizer is damaged, or the encoder's embedding has no
            row for the start, end or padding token.
    """
    folder = weights / name
    has_folder = folder.is_dir()
    tokenizer = CLIPTokenizer.from_pretrained(folder) if has_folder else CLIPTokenizer.shipped(pad)
    known = model.named_tensors()[_EMBEDDING].shape[0]
    largest = max(tokenizer.start, tokenizer.end, tokenizer.pad)
    if largest >= known:
        lacking = f"{folder} is missing" if weights.is_dir() else f"{weights} holds no tokenizer"
        which = f"{folder} has" if has_folder else f"{lacking}, and CLIP's usual tokenizer has"
        raise WeightsFormatError(
            f"tokenizer: {which} a token {largest}, but the text encoder knows {known} tokens; "
            "give the folder of the pipeline with its own tokenizers"
        )
    return tokenizer
