"""Encodes captions with SDXL's two text encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.families.pipeline.clip import clip_tokenizer
from trainable_candle.models import CLIPTextModel
from trainable_candle.text import PAD_OF_BIG_G, PAD_OF_CLIP_L, CLIPTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from typing_extensions import Self

    from trainable_candle import Tensor
    from trainable_candle.families.pipeline.family import PipelineFamily

_IDS: Final = ("input_ids", "input_ids_2")
"""The names of the token ids of CLIP-L and of OpenCLIP-bigG."""
MOST_CHUNKS: Final = 8
"""The most chunks (rows of 77 tokens) of a caption; longer captions are truncated."""


class TextEncoders:
    """CLIP-L and OpenCLIP-bigG with their tokenizers.

    Args:
        models: CLIP-L and OpenCLIP-bigG.
        tokenizers: the tokenizers of `models`, in the same order.
        clip_skip: the features are the input of the last layer (0), of the last but one (1), and
            so on.
        device: the device of the models.
    """

    def __init__(
        self,
        models: tuple[CLIPTextModel, CLIPTextModel],
        tokenizers: tuple[CLIPTokenizer, CLIPTokenizer],
        clip_skip: int,
        device: str,
    ) -> None:
        self.models = models
        self._tokenizers = tokenizers
        self._clip_skip = clip_skip
        self._device = device

    @classmethod
    def load(cls, family: PipelineFamily[Any], clip_skip: int = 0) -> Self:
        """Load the encoders and tokenizers of a family's weights.

        Raises:
            MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of
                another model.
        """
        clip_l, big_g = (
            CLIPTextModel.from_pretrained(
                **family.source(part), dtype=family.dtype, device=family.device
            )
            for part in ("text_encoder", "text_encoder_2")
        )
        tokenizers = (
            clip_tokenizer(family.weights, "tokenizer", PAD_OF_CLIP_L, clip_l),
            clip_tokenizer(family.weights, "tokenizer_2", PAD_OF_BIG_G, big_g),
        )
        return cls((clip_l, big_g), tokenizers, clip_skip, family.device)

    def size_of(self, caption: str) -> int:
        """Return the number of chunks of a caption, from 1 to `MOST_CHUNKS`."""
        return max(len(tokenizer.chunks(caption, MOST_CHUNKS)) for tokenizer in self._tokenizers)

    def truncates(self, caption: str) -> bool:
        """Return whether a caption has more than `MOST_CHUNKS` chunks."""
        most = MOST_CHUNKS
        return any(
            len(tokenizer.chunks(caption, most + 1)) > most for tokenizer in self._tokenizers
        )

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions.

        Returns:
            `encoder_hidden_states` (B, 77 n, 2048) and `text_embeds` (B, 1280). n is the number of
            chunks of the longest caption; shorter captions are padded with empty chunks.
        """
        return self.encode(self.tokens(captions), len(captions))

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the token ids of B captions for each encoder, (B n, 77); n as in `__call__`."""
        count = max(map(self.size_of, captions))
        return {
            name: tc.tensor(
                np.concatenate([_chunks(tokenizer, caption, count) for caption in captions]),
                device=self._device,
            )
            for name, tokenizer in zip(_IDS, self._tokenizers, strict=True)
        }

    def encode(self, tokens: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
        """Return what `__call__` returns, for `batch` captions, from the result of `tokens`."""
        states, pooled = [], None
        for name, model in zip(_IDS, self.models, strict=True):
            output = model(tokens[name])
            # Entry -1 is the output of the last layer, so entry -2 is its input.
            hidden = output.hidden_states[-(self._clip_skip + 2)]
            states.append(hidden.reshape(batch, -1, hidden.shape[-1]))
            # Keep the pooled features of each caption's first chunk, (batch, 1, features). Those of
            # the second encoder replace those of the first encoder.
            pooled = output.pooled.reshape(batch, -1, output.pooled.shape[-1]).narrow(1, 0, 1)
        assert pooled is not None
        return {"encoder_hidden_states": tc.cat(states, 2), "text_embeds": pooled.squeeze(1)}


def unread_layers(count: int, clip_skip: int) -> list[str]:
    """Return patterns of the names of CLIP-L's last layers, which do not affect the features.

    Of CLIP-L, `encode` returns only the hidden states that `clip_skip` selects. All layers of
    OpenCLIP-bigG affect its pooled features, which `encode` also returns.

    Args:
        count: the number of CLIP-L's layers.
        clip_skip: see `TextEncoders`.
    """
    return [rf".*encoder\.layers\.{n}\..*" for n in range(count - 1 - clip_skip, count)]


def _chunks(tokenizer: CLIPTokenizer, caption: str, count: int) -> npt.NDArray[np.int64]:
    """Return the token ids of a caption's chunks and of empty chunks, (count, 77)."""
    filled = tokenizer.chunks(caption, MOST_CHUNKS)
    empty = tokenizer.chunks("")
    return np.concatenate([filled, *[empty] * (count - len(filled))])
