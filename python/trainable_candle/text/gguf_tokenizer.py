"""Reads the tokenizer of a language model from the metadata of its GGUF file.

The keys and the types of tokens are those of llama.cpp (`gguf-py/gguf/constants.py` at
0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c). The names of the pre-tokenizers, which split text into
words before BPE, are those of llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import WeightsFormatError
from trainable_candle.text.tokenizer_files import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tokenizers import Tokenizer

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's regular expression of words, in which a number has up to three digits."""
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
"""Qwen2's regular expression of words, in which each digit is a word."""
GPT2: Final = "gpt-2"
"""The name of GPT-2's pre-tokenizer."""
SMOLLM: Final = "smollm"
"""The name of SmolLM's pre-tokenizer: GPT-2's, but each digit is a word."""
SPLITS: Final = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    GPT2: None, "default": None, SMOLLM: None,
}  # fmt: skip
"""The regular expression of words, by the pre-tokenizer's name; None: GPT-2's expression."""
NAMES: Final = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
"""The keys of special tokens in the file, after `tokenizer.ggml.`, by transformers' names."""
TEMPLATE: Final = "tokenizer.chat_template"
"""The key of the chat template in the file."""
NORMAL, CONTROL, USER, UNUSED, BYTE = 1, 3, 4, 5, 6
"""The types of tokens in the file's entry `tokenizer.ggml.token_type`."""
_ENDS: Final = ("eos_token_id", "eot_token_id")
"""The keys of the tokens that end a text or a turn, after `tokenizer.ggml.`."""
_CURE: Final = "give the folder of the original model, with its tokenizer.json, instead of the file"
"""The advice at the end of error messages."""


def read(
    path: Path, facts: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, str], dict[str, str], list[int]]:
    """Return the arguments of `ChatTokenizer`.

    They are the tokenizer, its special tokens by name, the chat templates by name, and the ids of
    end tokens. The key of the template `default` is `tokenizer.chat_template`; without it, no
    template is returned. The key of another template NAME is `tokenizer.chat_template.NAME`.

    Args:
        path: the path of the file, for messages.
        facts: the metadata of the file.

    Raises:
        WeightsFormatError: there is no tokenizer, or it is damaged or not supported.
    """
    entries = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in facts.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = entries.get("model")
    if kind not in _MAKERS:
        found = "no tokenizer" if kind is None else f"a tokenizer of the kind {kind!r}"
        raise WeightsFormatError(
            f"tokenizer: {path} has {found}, expected one of the kind gpt2 or llama; {_CURE}"
        )
    try:
        tokenizer, named = _built(entries)
    except Exception as error:
        # The library raises no narrower exception.
        raise WeightsFormatError(
            f"tokenizer: the tokenizer in {path} cannot be used: {error}"
        ) from error
    ends = [entries[key] for key in _ENDS if isinstance(entries.get(key), int)]
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or DEFAULT: value
        for key, value in facts.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(value, str)
    }
    return tokenizer, named, templates if DEFAULT in templates else {}, ends


def _built(entries: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer in the entries, which lack their prefix, and its special tokens."""
    from tokenizers import AddedToken  # noqa: PLC0415 - imported when first needed

    tokens = entries["tokens"]
    tokenizer = _MAKERS[entries["model"]](entries)
    types = entries.get("token_type") or [NORMAL] * len(tokens)
    added = [
        AddedToken(token, normalized=False, special=type_ == CONTROL)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in {CONTROL, USER}
    ]
    tokenizer.add_tokens(added)
    named = {
        name: tokens[entries[key]]
        for name, key in NAMES.items()
        if isinstance(entries.get(key), int) and 0 <= entries[key] < len(tokens)
    }
    _add_start(tokenizer, entries, named.get("bos_token"))
    return tokenizer, named


def byte_level(entries: Mapping[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer from a file's entries `tokens`, `merges` and `pre`.

    `pre` names the pre-tokenizer. The keys in `entries` lack the prefix `tokenizer.ggml.`.

    Raises:
        ValueError: the pre-tokenizer is not supported.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: PLC0415

    name = entries.get("pre", "default")
    if name not in SPLITS:
        raise ValueError(f"its pre-tokenizer `{name}` is not supported; {_CURE}")
    vocabulary = {token: number for number, token in enumerate(entries["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in entries.get("merges", ())]
    split = SPLITS[name]
    # Llama 3 encodes a word that is in the vocabulary as one token, whatever the merges.
    ignore_merges = split is _LLAMA3
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps: list[Any] = [to_bytes]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    if name == SMOLLM:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if split is _QWEN2:
        # Qwen2's tokenizer joins a letter and its accents into one character.
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(entries: Mapping[str, Any]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer from the file's entries `tokens` and `scores`.

    The file has no merges. Each division of a token into two tokens is a merge. The order of merges
    is transformers': those that make a token with a higher score come first, and those that make
    the same token are in the order of the ids of its two parts.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers  # noqa: PLC0415

    tokens, scores = entries["tokens"], entries["scores"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scored_merges = []
    for token, number in vocabulary.items():
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        scored_merges += [(-scores[number], pair) for pair in merges]
    # Negative scores put high scores first. The merges of one token keep their order.
    scored_merges.sort(key=lambda scored: scored[0])
    unknown = entries.get("unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in scored_merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in entries.get("token_type", ()),
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if entries.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        # Decoding removes one space at the beginning, and none at the end.
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_start(tokenizer: Tokenizer, entries: Mapping[str, Any], start: str | None) -> None:
    """Make texts begin with the token `start`, if there is one and `add_bos_token` requires it.

    If `entries` lacks `add_bos_token`, llama.cpp's default applies: SentencePiece tokenizers and
    Llama 3's add the token.
    """
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415

    default = entries["model"] == "llama" or SPLITS.get(entries.get("pre", "")) is _LLAMA3
    if start is None or not entries.get("add_bos_token", default):
        return
    number = tokenizer.token_to_id(start)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, number)]
    )


_MAKERS: Final[dict[str, Callable[[Mapping[str, Any]], Tokenizer]]] = {
    "gpt2": byte_level,
    "llama": _sentencepiece,
}
