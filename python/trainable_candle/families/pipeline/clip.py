"""CLIP text encoders of pipelines, with their tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text import CLIPTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from trainable_candle.models import CLIPTextModel

_TOKENS: Final = "text_model.embeddings.token_embedding.weight"


def clip_tokenizer(weights: Path, name: str, pad: str, model: CLIPTextModel) -> CLIPTokenizer:
    """The tokenizer of a pipeline; CLIP's usual tokenizer for original checkpoints without one.

    Args:
        weights: the pipeline's folder or an original checkpoint.
        name: the tokenizer's folder.
        pad: the padding token, if CLIP's usual tokenizer is used.
        model: the encoder that reads the tokens.

    Raises:
        MissingFileError: a file of the tokenizer is missing.
        WeightsFormatError: the tokenizer has tokens that the encoder lacks.
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
