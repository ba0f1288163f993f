"""T5's tokenizer against the token ids of transformers (tests/golden/text)."""

import base64
import gzip
import hashlib
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainable_candle.errors import ArgumentError, MissingFileError, WeightsFormatError
from trainable_candle.text import T5Tokenizer, sentencepiece

GOLDEN = Path(__file__).parents[1] / "golden" / "text" / "t5.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))["cases"]
SHIPPED = files("trainable_candle.text") / "assets" / "t5_spiece.model.gz"
LICENCE = files("trainable_candle.text") / "assets" / "t5_spiece.LICENSE.txt"


def model_bytes() -> bytes:
    """Return the shipped SentencePiece model."""
    return gzip.decompress(SHIPPED.read_bytes())


@pytest.fixture(scope="module")
def t5() -> T5Tokenizer:
    return T5Tokenizer.shipped()


def test_token_ids_equal_those_of_transformers(t5: T5Tokenizer) -> None:
    assert len(CASES) > 80
    for case in CASES:
        assert t5.encode(case["text"]) == case["ids"], case["text"]


@pytest.mark.parametrize("length", [1, 8, 77])
def test_padded_rows_equal_those_of_transformers(t5: T5Tokenizer, length: int) -> None:
    # `case["8"]` has the ids and the mask of the text's row of 8 tokens.
    cases = [case for case in CASES if str(length) in case]
    assert len(cases) > 50
    ids, mask = t5([case["text"] for case in cases], length)
    assert ids.dtype == mask.dtype == np.int64
    np.testing.assert_array_equal(ids, [case[str(length)][0] for case in cases])
    np.testing.assert_array_equal(mask, [case[str(length)][1] for case in cases])


def test_rows_end_with_the_end_token_and_padding(t5: T5Tokenizer) -> None:
    word = t5.encode("cat")
    ids, mask = t5(["", "cat", "cat " * 9], 4)
    assert ids.tolist() == [[1, 0, 0, 0], [*word, 1, 0, 0], [*word * 3, 1]]
    assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert [array.shape for array in t5([], 4)] == [(0, 4), (0, 4)]
    with pytest.raises(ArgumentError, match="the length is 0, expected 1 or more"):
        t5(["cat"], 0)


def test_the_shipped_model_is_the_published_one(t5: T5Tokenizer) -> None:
    assert hashlib.sha256(model_bytes()).hexdigest() in LICENCE.read_text(encoding="utf-8")
    assert (t5.size, t5.pad, t5.end) == (32100, 0, 1)
    assert t5.encode("<extra_id_99><extra_id_0>") == [32000, 32099]


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """Return the `tokenizer.json` that transformers 4 makes from the model file, with `changes`."""
    model = sentencepiece.parse(model_bytes())
    table = base64.b64encode(model.charsmap).decode()
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(100))]
    special = {
        "<pad>": 0,
        "</s>": 1,
        "<unk>": 2,
        **{token: 32000 + n for n, token in enumerate(sentinels)},
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        # The tokenizer must ignore this limit.
        "truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {"id": n, "content": token, "special": True, **flags} for token, n in special.items()
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": table},
                {"type": "Strip", "strip_left": False, "strip_right": True},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
            ],
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [*model.pieces, *((sentinel, 0.0) for sentinel in sentinels)],
        },
        **changes,
    }


def write_and_read(folder: Path, content: dict[str, Any]) -> T5Tokenizer:
    """Write `content` as tokenizer.json, and return the tokenizer of the folder."""
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return T5Tokenizer.from_pretrained(folder)


def test_spiece_model_and_tokenizer_json_give_the_same_tokenizer(
    tmp_path: Path, t5: T5Tokenizer
) -> None:
    (tmp_path / "spiece.model").write_bytes(model_bytes())
    from_model = T5Tokenizer.from_pretrained(tmp_path)
    from_json = write_and_read(tmp_path, tokenizer_json())
    assert from_json.size == from_model.size == t5.size
    for case in CASES:
        text, ids = case["text"], case["ids"]
        assert from_json.encode(text) == from_model.encode(text) == ids, text


def test_added_tokens_are_read_if_their_numbers_follow_the_others(
    tmp_path: Path, t5: T5Tokenizer
) -> None:
    content = tokenizer_json()
    content["added_tokens"].append({"id": 32100, "content": "<sks>", "special": False})
    added = write_and_read(tmp_path, content)
    assert added.encode("a <sks>") == [*t5.encode("a"), 32100]
    assert added.size == 32101
    content["added_tokens"][-1]["id"] = 32200
    with pytest.raises(WeightsFormatError, match="'<sks>' the number 32200, expected 32100"):
        write_and_read(tmp_path, content)


def test_tokenizer_json_may_have_no_normalizer(tmp_path: Path) -> None:
    tokenizer = write_and_read(tmp_path, tokenizer_json(normalizer=None))
    assert tokenizer.encode("a cat") == [3, 9, 1712]  # the pieces `▁`, `a` and `▁cat`
    # Without a normalizer, the full-width letter is unknown text.
    assert tokenizer.encode("\uff41") == [3, 2]


def test_transformers_makes_the_same_rows(tmp_path: Path, t5: T5Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    write_and_read(tmp_path, tokenizer_json())
    theirs = transformers.T5TokenizerFast.from_pretrained(tmp_path)
    texts = [case["text"] for case in CASES]
    for length in (3, 256, 512):
        expected = theirs(texts, padding="max_length", max_length=length, truncation=True)
        ids, mask = t5(texts, length)
        np.testing.assert_array_equal(ids, expected["input_ids"])
        np.testing.assert_array_equal(mask, expected["attention_mask"])


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(
        MissingFileError, match=r"no file .*spiece\.model; expected tokenizer\.json"
    ):
        T5Tokenizer.from_pretrained(tmp_path)
    intact = model_bytes()
    # Serialized protobuf messages. These are the pieces `abc`, and `<unk>` of type 2, unknown.
    piece = b"\x0a\x05\x0a\x03abc"
    unknown = b"\x0a\x09\x0a\x05<unk>\x18\x02"
    for damaged, message in (
        (intact[:-1], "ends within a field"),
        (intact[:100_000], "ends within a field"),
        # The trainer's settings, with the model's type 2.
        (unknown + b"\x12\x02\x18\x02", "of type 2, expected 1, unigram"),
        (piece, "has no piece for unknown text"),
        (unknown + piece, "the vocabulary has no '<pad>'"),
        (b"\x0b", "wire type 3"),
        (b"\x08" + b"\xff" * 11, "an integer of more than 64 bits"),
        # A piece of two bytes: the tag of a number of four bytes, and only one byte of the number.
        (b"\x0a\x02\x0d\x00", "ends within a field"),
    ):
        (tmp_path / "spiece.model").write_bytes(damaged)
        with pytest.raises(WeightsFormatError, match=message):
            T5Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(WeightsFormatError, match="has no unigram model, which T5 needs"):
        write_and_read(
            tmp_path, tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": []})
        )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsFormatError, match="cannot be read: "):
        T5Tokenizer.from_pretrained(tmp_path)


def test_a_piece_without_text_is_an_error() -> None:
    # Field 1 of the model is a piece: here one with only a type (field 3), normal (1).
    piece = bytes([3 << 3, 1])
    with pytest.raises(ValueError, match="piece 0 of the SentencePiece model has no text"):
        sentencepiece.parse(bytes([1 << 3 | 2, len(piece)]) + piece)


def test_a_damaged_table_of_characters_is_a_format_error(tmp_path: Path) -> None:
    damaged = bytearray(model_bytes())
    table = sentencepiece.parse(bytes(damaged)).charsmap
    start = damaged.find(table)
    # Keep the first four bytes of the table, which are a length. Overwrite the entries after them
    # with offsets beyond the end of the table.
    damaged[start + 4 : start + 4 + 4096] = b"\xff\x7f\xff\x7f" * 1024
    (tmp_path / "spiece.model").write_bytes(damaged)
    tokenizer = T5Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(WeightsFormatError, match="cannot be encoded: "):
        tokenizer.encode("caf\u00e9 \uff21\u0301")


def test_importing_text_does_not_import_the_library_tokenizers() -> None:
    code = "import sys, trainable_candle.text; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
