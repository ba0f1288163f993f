"""CLIP's tokenizer against token ids from transformers (tests/golden/text)."""

import gzip
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.text import PAD_OF_BIG_G, PAD_OF_CLIP_L, CLIPTokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "text" / "transformers.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))["cases"]
START, END = 49406, 49407
"""The ids of the start and the end token."""
MERGES = files("trainable_candle.text") / "assets" / "clip_merges.txt.gz"


@pytest.fixture(scope="module")
def clip_l() -> CLIPTokenizer:
    return CLIPTokenizer.shipped(PAD_OF_CLIP_L)


@pytest.fixture(scope="module")
def big_g() -> CLIPTokenizer:
    return CLIPTokenizer.shipped(PAD_OF_BIG_G)


def test_token_ids_equal_those_of_transformers(clip_l: CLIPTokenizer) -> None:
    assert len(CASES) > 80
    for case in CASES:
        assert clip_l.encode(case["text"]) == case["ids"], case["text"]


def test_padded_rows_equal_those_of_transformers(
    clip_l: CLIPTokenizer, big_g: CLIPTokenizer
) -> None:
    texts = [case["text"] for case in CASES]
    np.testing.assert_array_equal(clip_l(texts), [case["clip_l"] for case in CASES])
    # big-G pads with "!", which has the id 0. transformers also takes every "!" of a text for
    # padding; OpenCLIP, which trained the encoder, and ComfyUI do not.
    cases = [case for case in CASES if "!" not in case["text"]]
    assert len(cases) > 60
    found = big_g([case["text"] for case in cases])
    np.testing.assert_array_equal(found, [case["big_g"] for case in cases])
    assert big_g(["hello! !"])[0, :5].tolist() == [START, *clip_l.encode("hello! !"), END]


def test_long_texts_are_divided_into_rows(big_g: CLIPTokenizer) -> None:
    # A row of 77 has a start token, up to 75 tokens of the text, an end token, and padding of 0.
    # `-(-n // 75)` rounds n / 75 up.
    for case in CASES:
        rows = big_g.chunks(case["text"], most=4)
        used_ids = case["ids"][: 4 * 75]
        assert rows.shape == (max(1, -(-len(used_ids) // 75)), 77)
        content = [n for row in rows.tolist() for n in row[1:76]]
        assert content[: len(used_ids)] == used_ids
        assert (rows[:, 0] == START).all()
        for number, row in enumerate(rows.tolist()):
            filled = min(75, len(used_ids) - 75 * number)
            assert row[filled + 1 :] == [END] + [0] * (75 - filled)
        assert big_g.chunks(case["text"], most=1).tolist() == rows[:1].tolist()


def vocabulary() -> tuple[dict[str, int], list[str]]:
    """Return the token ids of a small vocabulary, where `!` has the id 0, and its merges.

    The tokens are `!`, letters, the bytes of `ü`, parts of `cat` and `cats`, these words, and the
    start and end tokens.
    """
    merges = ["a t</w>", "c at</w>", "a t", "c at", "cat s</w>"]
    tokens = ["!", *"acst", "a</w>", "c</w>", "s</w>", "t</w>", "Ã", "¼", "¼</w>"]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: index for index, token in enumerate(tokens)}, merges


def write_slow(folder: Path, **settings: Any) -> dict[str, int]:
    """Write a small vocabulary, its merges and `settings` to a folder; return the token ids.

    transformers calls a tokenizer of these files slow, and one of tokenizer.json fast.
    """
    ids, merges = vocabulary()
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    lines = ["#version: 0.2", *merges, ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ids


@pytest.mark.parametrize("pad", ["!", {"content": "!", "lstrip": False}])
def test_a_folder_with_vocabulary_and_merges_is_read(tmp_path: Path, pad: Any) -> None:
    ids = write_slow(tmp_path, pad_token=pad, model_max_length=6)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    words = [ids[token] for token in ("cat</w>", "cats</w>", "Ã", "¼</w>")]
    start, end = ids["<|startoftext|>"], ids["<|endoftext|>"]
    assert tokenizer.encode("Cat CATS Ü") == words
    assert tokenizer(["cat"]).tolist() == [[start, words[0], end, 0, 0, 0]]


def test_tokenizer_json_gives_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ids = write_slow(tmp_path / "slow", pad_token="<|endoftext|>")
    slow = CLIPTokenizer.from_pretrained(tmp_path / "slow")
    (tmp_path / "fast").mkdir()
    saved = tokenizers.Tokenizer.from_str(slow._tokenizer.to_str())
    # Published files also set padding, truncation and a post-processor; the loader must ignore
    # them.
    saved.enable_padding(length=77)
    saved.enable_truncation(max_length=20)
    saved.post_processor = tokenizers.processors.RobertaProcessing(
        ("<|endoftext|>", ids["<|endoftext|>"]), ("<|startoftext|>", ids["<|startoftext|>"])
    )
    saved.save(str(tmp_path / "fast" / "tokenizer.json"))
    fast = CLIPTokenizer.from_pretrained(tmp_path / "fast")
    text = "cat cats " * 40
    assert fast.encode(text) == slow.encode(text) == [ids["cat</w>"], ids["cats</w>"]] * 40
    np.testing.assert_array_equal(fast([text, ""]), slow([text, ""]))


def test_the_pad_token_may_stand_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    write_slow(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "!"}')
    assert CLIPTokenizer.from_pretrained(tmp_path).pad == 0


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"there is no file .*vocab\.json; expected"):
        CLIPTokenizer.from_pretrained(tmp_path)
    write_slow(tmp_path, pad_token="<pad>")
    with pytest.raises(WeightsFormatError, match="the vocabulary has no '<pad>'"):
        CLIPTokenizer.from_pretrained(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(MissingFileError, match=r"there is no file .*merges\.txt"):
        CLIPTokenizer.from_pretrained(tmp_path)
    # The vocabulary has neither of the tokens to merge.
    (tmp_path / "merges.txt").write_text("x yy\n")
    with pytest.raises(WeightsFormatError, match="cannot be read: "):
        CLIPTokenizer.from_pretrained(tmp_path)
    # If there is a tokenizer.json, it is read instead of the other files.
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsFormatError, match="cannot be read: "):
        CLIPTokenizer.from_pretrained(tmp_path)


def test_the_shipped_vocabulary_has_the_size_of_the_published_one() -> None:
    lines = gzip.decompress(MERGES.read_bytes()).decode().splitlines()
    # The first line has the version. The tokens are 256 bytes, the same at the end of a word, the
    # merges, and the start and end tokens.
    assert len(lines) - 1 + 2 * 256 + 2 == 49408


def test_importing_text_does_not_import_the_library_tokenizers() -> None:
    code = "import sys, trainable_candle.text; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
