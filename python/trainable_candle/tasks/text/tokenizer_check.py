"""Checks, before a language model is loaded, that its tokenizer and the length of rows fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.text.tokenizer_files import CONFIGS, read_object, token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle.text.chat_tokenizer import ChatTokenizer

ROW: Final = 2048
"""The number of tokens of a packed row by default, if the model's context is not shorter."""
_DEFAULTS: Final = {"eos_token_id": 2, "bos_token_id": 1}
"""The ids that transformers writes into the configuration of a Llama or Mistral model whose author
gave no ids. They say nothing about the tokenizer."""
_CURE: Final = "the tokenizer is another model's; give the model with its own tokenizer files"


def context_of(settings: Mapping[str, Any]) -> int:
    """Return a model's context, the most tokens of a text; `settings` is its `config.json`."""
    # 2048 is transformers' default for Llama; other models' configurations have the entry.
    return int(settings.get("max_position_embeddings", 2048))


def row_length(wanted: int | None, context: int) -> int:
    """Return the number of tokens of a packed row.

    This is `wanted`; by default, it is the smaller of `ROW` and the context.

    Raises:
        ConfigError: the context is shorter than `wanted`.
    """
    if wanted is not None and wanted > context:
        raise ConfigError(
            f"--sequence-length is {wanted}, and the model was made for {context} positions; give "
            "at most that many"
        )
    return wanted or min(ROW, context)


def check_tokenizer(tokenizer: ChatTokenizer, weights: Path, vocabulary: int) -> None:
    """Check that the tokenizer that was found with a model's weights is that model's.

    In published models, the embedding may have more rows than the tokenizer has tokens. It may lack
    rows for added tokens that occur in no text. The model's `eos_token_id` may differ from the
    tokenizer's end token, but it is always the id of a special or an added token. For a GGUF file,
    only the number of tokens is checked.

    Args:
        tokenizer: the tokenizer.
        weights: the folder of the model, or a file in it.
        vocabulary: the number of rows of the model's embedding.

    Raises:
        WeightsFormatError: the tokenizer, without added tokens, has more tokens than the embedding
            has rows; or an id of a start or end token in `generation_config.json`, or else in
            `config.json`, is that of ordinary text; or none of an entry's ids is in the tokenizer;
            or one of these files is damaged.
    """
    if tokenizer.size_without_added > vocabulary:
        raise WeightsFormatError(
            f"tokenizer: {weights} has a tokenizer of {tokenizer.size_without_added} tokens, and "
            f"the model's embedding has {vocabulary} rows: {_CURE}"
        )
    if weights.suffix == ".gguf":
        return
    folder = weights if weights.is_dir() else weights.parent
    for name, default in _DEFAULTS.items():
        # As in transformers, `generation_config.json` has precedence.
        for path in (folder / file for file in CONFIGS):
            config = read_object(path)
            ids = token_ids(config, name)
            # transformers made a `generation_config.json` with this mark from `config.json`.
            may_be_default = path.name == "config.json" or config.get("_from_model_config")
            if ids and not (may_be_default and ids == [default]):
                _check_special(tokenizer, ids, f"tokenizer: {name} in {path}")
            if ids:
                break


def _check_special(tokenizer: ChatTokenizer, ids: Sequence[int], entry: str) -> None:
    """Check that no id is that of ordinary text, and that the tokenizer has at least one of them.

    `entry` names the ids in messages.
    """
    for number in ids:
        if tokenizer.is_ordinary(number):
            text = tokenizer.decode([number], special=True)
            raise WeightsFormatError(f"{entry} is {number}, the ordinary text {text!r}: {_CURE}")
    if all(number >= tokenizer.size for number in ids):
        raise WeightsFormatError(
            f"{entry} is {ids[0]}, and the tokenizer has {tokenizer.size} tokens: {_CURE}"
        )
