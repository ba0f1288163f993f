"""A vocabulary without the token for unknown text."""

import json
from pathlib import Path

import pytest

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text import CLIPTokenizer


def test_vocabulary_without_its_unknown_token_is_a_format_error(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "a</w>": 1, "<|startoftext|>": 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(WeightsFormatError, match="tokenizer: "):
        CLIPTokenizer.from_pretrained(tmp_path).encode("ab")
