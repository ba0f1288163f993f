"""T5 as the text encoder of pipelines, with its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import WeightsFormatError
from trainable_candle.models import T5Encoder
from trainable_candle.text import T5Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from trainable_candle import Tensor
    from trainable_candle.families.pipeline.family import PipelineFamily

_TOKENS: Final = "shared.weight"


class T5:
    """The encoder and its tokenizer.

    Args:
        model: the encoder.
        tokenizer: its tokens.
        length: tokens of a caption: shorter ones are padded, and the padding is read too, as in
            diffusers' pipelines; longer ones are cut.
        device: of the encoder.
    """

    def __init__(self, model: T5Encoder, tokenizer: T5Tokenizer, length: int, device: str) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._length = length
        self._device = device

    @classmethod
    def load(cls, family: PipelineFamily[Any], number: int, length: int) -> Self:
        """The encoder of a family's weights.

        Args:
            family: whose it is.
            number: of the text encoder in the pipeline, from 1.
            length: tokens of a caption.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of
                another model.
        """
        model = T5Encoder.from_pretrained(
            **family.source(f"text_encoder_{number}"), dtype=family.dtype, device=family.device
        )
        folder = family.weights / f"tokenizer_{number}"
        there = folder.is_dir()
        tokenizer = T5Tokenizer.from_pretrained(folder) if there else T5Tokenizer.shipped()
        known = model.named_tensors()[_TOKENS].shape[0]
        if tokenizer.size > known:
            which = f"{folder} has" if there else "T5's usual one has"
            raise WeightsFormatError(
                f"tokenizer: {which} {tokenizer.size} tokens, where the text encoder knows {known};"
                " give the folder of the pipeline with its own tokenizers"
            )
        return cls(model, tokenizer, length, family.device)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """The states of captions, (B, length, width)."""
        ids, _ = self._tokenizer(captions, self._length)
        return self.model(tc.tensor(ids, device=self._device))
