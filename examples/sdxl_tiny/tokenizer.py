"""Makes a small byte-level BPE vocabulary and writes it as CLIP's tokenizer files."""

import itertools
import json
from collections import Counter
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
PAD_SECOND = "!"
"""The second tokenizer's token for padding, as in OpenCLIP; its id is 0."""
WORD_END = "</w>"
MERGES = 640
"""The number of pairs of symbols that are merged into one."""

# Words that are frequent in prompts. The merges are trained on these words too, so that each word
# becomes one or two tokens instead of a token per letter.
COMMON = (Path(__file__).parent / "words.txt").read_text("utf-8").split()
COMMON_COUNT = 5
"""How often each word of `COMMON` counts in addition to its occurrences in captions."""


def byte_symbols() -> list[str]:
    """Return the printable characters by which GPT-2 represents the 256 bytes, in CLIP's order.

    A printable byte is its own character; the other bytes, in order, are the characters from 256.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def train_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """Return the pairs of symbols that byte-pair encoding merges (Sennrich et al., 2016).

    Each of `count` merges joins the pair that is most frequent in the words; of equally frequent
    pairs, the first in the sort order of strings. Training ends earlier if no word has two symbols.

    Args:
        words: ASCII words with the number of their occurrences.
        count: the greatest number of merges.
    """
    spelled = {word: (*word[:-1], word[-1] + WORD_END) for word in words}
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in spelled.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = {word: joined(symbols, best) for word, symbols in spelled.items()}
    return merges


def joined(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Return the symbols of a word with each occurrence of `pair` joined to one symbol."""
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def write(folder: Path, captions: list[str]) -> int:
    """Write FOLDER/tokenizer and FOLDER/tokenizer_2; returns the size of the vocabulary.

    The last two tokens of the vocabulary are `START` and `END`.
    """
    words = Counter(word.strip(",") for caption in captions for word in caption.split())
    words.update(dict.fromkeys(COMMON, COMMON_COUNT))
    merges = train_merges(words, MERGES)
    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + WORD_END for symbol in symbols)]
    tokens += ["".join(pair) for pair in merges]
    tokens += [START, END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for name, pad in (("tokenizer", END), ("tokenizer_2", PAD_SECOND)):
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
        (target / "merges.txt").write_text("\n".join(lines), "utf-8")
        write_json(target / "vocab.json", vocabulary)
        special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
        write_json(target / "special_tokens_map.json", special)
        settings = {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": 77,
            "do_lower_case": True,
            "add_prefix_space": False,
            **special,
        }
        write_json(target / "tokenizer_config.json", settings)
    return len(vocabulary)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
