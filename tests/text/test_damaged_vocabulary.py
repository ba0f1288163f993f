"""CLIP's tokenizer rejects a vocabulary without the token for unknown text."""

import json
from pathlib import Path

import pytest

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text import CLIPTokenizer


def test_a_vocabulary_without_a_token_for_unknown_text_is_a_format_error(tmp_path: Path) -> None:
    # CLIP's token for unknown text is its end token, `<|endoftext|>`.
    vocabulary = {"a": 0, "a</w>": 1, "<|startoftext|>": 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(WeightsFormatError, match="tokenizer: "):
        # The letter "b" is not in the vocabulary.
        CLIPTokenizer.from_pretrained(tmp_path).encode("ab")
