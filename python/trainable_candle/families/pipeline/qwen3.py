"""Qwen3 as the text encoder of pipelines, with its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import WeightsFormatError
from trainable_candle.models import CausalLM
from trainable_candle.text.prompt_tokenizer import FILE, PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.families.pipeline.family import PipelineFamily

MOST_TOKENS = 512
"""The most tokens of a caption in its template, as in diffusers' pipelines."""


class Qwen3:
    """The encoder and its tokenizer; layers after the last that is used are not loaded.

    Args:
        family: the family with the weights.
        layers: the layers whose hidden states are used, counted from 1.
        thinks: see `PromptTokenizer`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: PipelineFamily[Any], layers: Sequence[int], *, thinks: bool) -> None:
        folder = tokenizer_folder(family)
        self.tokenizer = PromptTokenizer.from_pretrained(folder, thinks=thinks)
        self._layers = list(layers)
        self._model = CausalLM.from_pretrained(
            **family.source("text_encoder"),
            dtype=family.dtype,
            device=family.device,
            layers=max(layers),
        )
        if self.tokenizer.size > self._model.vocab_size:
            raise WeightsFormatError(
                f"tokenizer: {folder} has {self.tokenizer.size} tokens, where the text encoder "
                f"knows {self._model.vocab_size}; give the folder of the pipeline with its own"
            )
        self._device = family.device

    def states(self, tokens: Sequence[int]) -> list[Tensor]:
        """The states of a row of tokens, (1, L, width) for each layer."""
        ids = tc.tensor(np.array([tokens], np.int64), device=self._device)
        states: list[Tensor] = self._model.hidden_states(ids, layers=self._layers)
        return states

    def padded_states(self, tokens: Sequence[int], length: int) -> list[Tensor]:
        """The states of a row of tokens, padded to `length`; (length, width) for each layer."""
        row = [*tokens, *[self.tokenizer.pad] * (length - len(tokens))]
        ids = tc.tensor(np.array(row, np.int64), device=self._device)
        states: list[Tensor] = self._model.padded_states(ids, len(tokens), self._layers)
        return states


def tokenizer_folder(family: PipelineFamily[Any]) -> Path:
    """The folder of the tokenizer, in the pipeline's folder or beside the text encoder.

    Raises:
        WeightsFormatError: there is none.
    """
    encoder = family.facts.parts["text_encoder"].path
    near = encoder if encoder.is_dir() else encoder.parent
    places = [family.weights / "tokenizer", near / "tokenizer", near.parent / "tokenizer", near]
    for place in places:
        if (place / FILE).is_file():
            return place
    raise WeightsFormatError(
        f"tokenizer: there is no {FILE} of Qwen3 with {family.weights}; give the folder of the "
        f"pipeline, or put its folder tokenizer beside {encoder}"
    )
