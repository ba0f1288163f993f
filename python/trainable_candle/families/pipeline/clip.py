"""The tokenizers of pipelines' CLIP text encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text import CLIPTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.models import CLIPTextModel

_TOKENS: Final = "text_model.embeddings.token_embedding.weight"


def pooled_width(config: Mapping[str, Any]) -> int:
    """Return the number of pooled features of a CLIP encoder with this configuration."""
    projects = config["architectures"] == ["CLIPTextModelWithProjection"]
    return int(config["projection_dim"] if projects else config["hidden_size"])


def clip_tokenizer(weights: Path, name: str, pad: str, model: CLIPTextModel) -> CLIPTokenizer:
    """Return the tokenizer of a CLIP text encoder in a pipeline.

    Weights without a tokenizer, such as original checkpoints, get the CLIP tokenizer that the
    package ships.

    Args:
        weights: the pipeline's folder or an original checkpoint.
        name: the name of the tokenizer's folder within the pipeline's folder.
        pad: the padding token of the tokenizer that the package ships.
        model: the text encoder that reads the tokens.

    Raises:
        MissingFileError: the tokenizer's folder lacks a file.
        WeightsFormatError: the encoder's embedding has no row for one of the tokenizer's start, end
            and padding tokens.
    """
    folder = weights / name
    there = folder.is_dir()
    tokenizer = CLIPTokenizer.from_pretrained(folder) if there else CLIPTokenizer.shipped(pad)
    known = model.named_tensors()[_TOKENS].shape[0]
    last = max(tokenizer.start, tokenizer.end, tokenizer.pad)
    if last >= known:
        lacking = f"{folder} is missing" if weights.is_dir() else f"{weights} holds no tokenizer"
        which = f"{folder} has" if there else f"{lacking}, and CLIP's usual tokenizer has"
        raise WeightsFormatError(
            f"tokenizer: {which} a token {last}, but the text encoder knows {known} tokens; "
            "give the folder of the pipeline with its own tokenizers"
        )
    return tokenizer
