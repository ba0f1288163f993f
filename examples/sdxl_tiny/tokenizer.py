"""A small byte-level BPE vocabulary in CLIP's files: vocab.json, merges.txt and their settings."""

import itertools
import json
from collections import Counter
from pathlib import Path

START, END, PAD_SECOND = "<|startoftext|>", "<|endoftext|>", "!"
WORD_END = "</w>"
MERGES = 640

# Words that are frequent in prompts. The merges are trained on these words too, so that each word
# becomes one or two tokens instead of a token per letter.
COMMON = (Path(__file__).parent / "words.txt").read_text("utf-8").split()


def byte_symbols() -> list[str]:
    """Return the printable characters by which GPT-2 represents the 256 bytes, in CLIP's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def train_merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """Merge the most frequent pair of symbols, `count` times (Sennrich et al., 2016)."""
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
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def write(folder: Path, captions: list[str]) -> int:
    """Write FOLDER/tokenizer and FOLDER/tokenizer_2; returns the size of the vocabulary."""
    words = Counter(word.strip(",") for caption in captions for word in caption.split())
    words.update(dict.fromkeys(COMMON, 5))
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
