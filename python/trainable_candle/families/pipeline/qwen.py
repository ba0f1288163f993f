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
    """The arguments of `PromptTokenizer` that choose the form of the chat template."""

    thinks: bool
    """Whether the answer may begin with thoughts."""
    system: str | None
    """The text of a system's turn before the user's; None for no such turn."""


class QwenEncoder:
    """The base of Qwen's text encoders: a language model and its tokenizer.

    Args:
        family: the family with the weights.
        layers: the number of decoder layers to load, from the first; None: all.
        template: the arguments of `PromptTokenizer`.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    display_name: ClassVar[str]
    """The model's name in messages."""

    def __init__(
        self, family: PipelineFamily[Any], layers: int | None, **template: Unpack[Template]
    ) -> None:
        folder = tokenizer_folder(family, self.display_name)
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

    display_name: ClassVar[str] = "Qwen2.5-VL"

    def __init__(self, family: PipelineFamily[Any], system: str) -> None:
        super().__init__(family, layers=None, system=system)

    def states(self, tokens: Sequence[int]) -> Tensor:
        """Return the hidden states of L tokens after the final norm, (1, L, width)."""
        count = len(tokens)
        # `cu_seqlens` has the bounds of the sequences in the row of tokens, which is one sequence.
        ids, positions, cu_seqlens = (
            tc.tensor(np.array(numbers, np.int64), device=self._device)
            for numbers in (tokens, range(count), [0, count])
        )
        return self._model.hidden(ids, positions, cu_seqlens).unsqueeze(0)


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

    display_name: ClassVar[str] = "Qwen3"

    def __init__(self, family: PipelineFamily[Any], layers: Sequence[int], *, thinks: bool) -> None:
        super().__init__(family, max(layers), thinks=thinks)
        self._layers = list(layers)

    def states(self, tokens: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of L tokens after each of the `layers`, each (1, L, width)."""
        ids = tc.tensor(np.array([tokens], np.int64), device=self._device)
        states: list[Tensor] = self._model.hidden_states(ids, layers=self._layers)
        return states

    def padded_states(self, tokens: Sequence[int], length: int) -> list[Tensor]:
        """Return the hidden states after each of the `layers`, each (length, width).

        Args:
            tokens: at least one token and at most `length`.
            length: the number of tokens to which `tokens` are padded.
        """
        padded = [*tokens, *[self.tokenizer.pad] * (length - len(tokens))]
        ids = tc.tensor(np.array(padded, np.int64), device=self._device)
        states: list[Tensor] = self._model.padded_states(ids, len(tokens), self._layers)
        return states


def tokenizer_folder(family: PipelineFamily[Any], display_name: str = Qwen3.display_name) -> Path:
    """Return the folder with the text encoder's `tokenizer.json` or `vocab.json`.

    It is the first of these folders that has one of the files: `tokenizer` in the pipeline's
    folder, `tokenizer` in the text encoder's folder, `tokenizer` next to the text encoder's folder,
    and the text encoder's folder. A text encoder in a file has the folder of that file.

    Args:
        family: the family with the weights.
        display_name: the text encoder's name in messages.

    Raises:
        WeightsFormatError: none of these folders has one of the files.
    """
    encoder = family.facts.parts["text_encoder"].path
    folder = encoder if encoder.is_dir() else encoder.parent
    inside, beside = folder / "tokenizer", folder.parent / "tokenizer"
    for candidate in (family.weights / "tokenizer", inside, beside, folder):
        if (candidate / FILE).is_file() or (candidate / VOCABULARY).is_file():
            return candidate
    raise WeightsFormatError(
        f"tokenizer: there is no {FILE} or {VOCABULARY} of {display_name} with {family.weights}; "
        "give the folder of the pipeline, or put the pipeline's folder `tokenizer` next to "
        f"{encoder}"
    )
