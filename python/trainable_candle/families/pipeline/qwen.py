"""Qwen's language models as text encoders of pipelines, with their tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import WeightsFormatError
from trainable_candle.models import CausalLM
from trainable_candle.text.prompt_tokenizer import FILE, VOCABULARY, PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from trainable_candle import Tensor
    from trainable_candle.families.pipeline.family import PipelineFamily

MOST_TOKENS = 512
"""The most tokens of a caption including its chat template, as in diffusers' pipelines."""


class Template(TypedDict, total=False):
    """The arguments of `PromptTokenizer` that determine its chat template."""

    thinks: bool
    system: str | None


class QwenEncoder:
    """The base of the text encoders: a language model and its tokenizer.

    Args:
        family: the family with the weights.
        layers: the number of decoder layers to load, from the first; None: all.
        template: the arguments of `PromptTokenizer`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    of: ClassVar[str]
    """The model's name in messages."""

    def __init__(
        self, family: PipelineFamily[Any], layers: int | None, **template: Unpack[Template]
    ) -> None:
        folder = tokenizer_folder(family, self.of)
        self.tokenizer = PromptTokenizer.from_pretrained(folder, **template)
        self._model = CausalLM.from_pretrained(
            **family.source("text_encoder"),
            dtype=family.dtype,
            device=family.device,
            layers=layers,
        )
        if self.tokenizer.size > self._model.vocab_size:
            raise WeightsFormatError(
                f"tokenizer: {folder} has {self.tokenizer.size} tokens, but the text encoder "
                f"knows {self._model.vocab_size}; give a pipeline with its own tokenizer"
            )
        self._device = family.device


class Qwen25VL(QwenEncoder):
    """The language model of Qwen2.5-VL with its tokenizer.

    Args:
        family: the family with the weights.
        system: as for `PromptTokenizer`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    of: ClassVar[str] = "Qwen2.5-VL"

    def __init__(self, family: PipelineFamily[Any], system: str) -> None:
        super().__init__(family, None, system=system)

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the hidden states of L tokens after the final norm, (1, L, width)."""
        count = len(tokens)
        ids, places, bounds = (
            tc.tensor(np.array(row, np.int64), device=self._device)
            for row in (tokens, range(count), [0, count])
        )
        return self._model.hidden(ids, places, bounds).unsqueeze(0)


class Qwen3(QwenEncoder):
    """Qwen3 with its tokenizer; decoder layers after the last one in `layers` are not loaded.

    Args:
        family: the family with the weights.
        layers: the decoder layers whose outputs are the hidden states, counted from 1.
        thinks: see `PromptTokenizer`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    of: ClassVar[str] = "Qwen3"

    def __init__(self, family: PipelineFamily[Any], layers: Sequence[int], *, thinks: bool) -> None:
        super().__init__(family, max(layers), thinks=thinks)
        self._layers = list(layers)

    def states(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of L tokens after each of the `layers`, each (1, L, width)."""
        ids = tc.tensor(np.array([tokens], np.int64), device=self._device)
        states: list[Tensor] = self._model.hidden_states(ids, layers=self._layers)
        return states

    def padded_states(self, tokens: Sequence[int], length: int) -> list[Tensor]:
        """Return the hidden states of tokens padded to `length`, for each layer (length, width)."""
        row = [*tokens, *[self.tokenizer.pad] * (length - len(tokens))]
        ids = tc.tensor(np.array(row, np.int64), device=self._device)
        states: list[Tensor] = self._model.padded_states(ids, len(tokens), self._layers)
        return states


def tokenizer_folder(family: PipelineFamily[Any], of: str = Qwen3.of) -> Path:
    """Return the folder of the tokenizer's files.

    It is the first of these folders that has such a file: `tokenizer` in the pipeline's folder,
    `tokenizer` in the text encoder's folder, `tokenizer` beside the text encoder's folder, and the
    text encoder's folder.

    Args:
        family: the family with the weights.
        of: the text encoder's name in messages.

    Raises:
        WeightsFormatError: no such folder has a tokenizer's file.
    """
    encoder = family.facts.parts["text_encoder"].path
    near = encoder if encoder.is_dir() else encoder.parent
    places = [family.weights / "tokenizer", near / "tokenizer", near.parent / "tokenizer", near]
    for place in places:
        if (place / FILE).is_file() or (place / VOCABULARY).is_file():
            return place
    raise WeightsFormatError(
        f"tokenizer: there is no {FILE} of {of} with {family.weights}; give the folder of the "
        f"pipeline, or put the pipeline's folder `tokenizer` beside {encoder}"
    )
