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

_EMBEDDING: Final = "shared.weight"
"""The weight that has a row for each token."""


class T5:
    """The T5 encoder and its tokenizer.

    Args:
        model: the encoder.
        tokenizer: the encoder's tokenizer.
        length: the most tokens of a caption, including the end token. Longer captions are
            truncated.
        device: the device of the encoder.
    """

    def __init__(self, model: T5Encoder, tokenizer: T5Tokenizer, length: int, device: str) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._length = length
        self._device = device

    @classmethod
    def load(cls, family: PipelineFamily[Any], part: str, length: int) -> Self:
        """Load the T5 encoder and the tokenizer of a family's weights.

        If the weights have no folder of the tokenizer, the tokenizer is the one in the package.

        Args:
            family: the family with the weights.
            part: the name of the text encoder's folder in the pipeline.
            length: as for the class.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of
                another model.
        """
        model = T5Encoder.from_pretrained(
            **family.source(part), dtype=family.dtype, device=family.device
        )
        folder = family.weights / part.replace("text_encoder", "tokenizer")
        has_folder = folder.is_dir()
        tokenizer = T5Tokenizer.from_pretrained(folder) if has_folder else T5Tokenizer.shipped()
        known = model.named_tensors()[_EMBEDDING].shape[0]
        if tokenizer.size > known:
            which = f"{folder} has" if has_folder else "T5's usual tokenizer has"
            raise WeightsFormatError(
                f"tokenizer: {which} {tokenizer.size} tokens, but the text encoder knows {known}; "
                "give the folder of the pipeline with its own tokenizers"
            )
        return cls(model, tokenizer, length, family.device)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return the encoder's outputs for B captions, (B, length, width).

        Shorter captions are padded to `length`. The padding is not masked, as in diffusers'
        pipelines of Stable Diffusion 3 and Flux.
        """
        ids, _ = self._tokenizer(captions, self._length)
        return self.model(tc.tensor(ids, device=self._device))

    def truncates(self, caption: str) -> bool:
        """Return whether a caption with its end token has more than `length` tokens."""
        return len(self._tokenizer.encode(caption)) + 1 > self._length

    def read_tokens(self, caption: str) -> int:
        """Return the number of tokens that `encode_one` encodes for a caption.

        They are the caption's tokens, the end token and one padding token, but at most `length`.
        """
        return min(self._length, len(self._tokenizer.encode(caption)) + 2)

    def encode_one(self, caption: str) -> Tensor:
        """Return the encoder's outputs for a caption and one padding token, which is masked.

        The mask hides the padding token from the caption's tokens. Its own output is among the
        results, because Chroma's transformer reads the outputs of a caption and one padding token.

        Returns:
            (1, L, width), with L = `read_tokens(caption)`. If the caption with its end token has
            `length` tokens or more, there is no padding token.
        """
        # Both are (1, length); a copy of their first columns is dense.
        ids, mask = self._tokenizer([caption], self._length)
        count = self.read_tokens(caption)
        return self.model(
            *(tc.tensor(array[:, :count].copy(), device=self._device) for array in (ids, mask))
        )

    @staticmethod
    def working_values(family: PipelineFamily[Any], part: str, tokens: int) -> int:
        """Return the most values that the encoder `part` holds while it encodes `tokens` tokens."""
        config = family.facts.parts[part].config
        # The widest layer is the gated feed-forward layer: two results of `d_ff` features for each
        # token, besides about four of `d_model` features.
        return int(tokens * (2 * config["d_ff"] + 4 * config["d_model"]))
