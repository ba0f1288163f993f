"""The tokenizer of a language model, as metadata of a GGUF file for llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GPT2,
    NAMES,
    NORMAL,
    SMOLLM,
    SPLITS,
    TEMPLATE,
    UNUSED,
    USER,
)
from trainable_candle.text.tokenizer_files import (
    DEFAULT,
    chat_templates,
    end_tokens,
    read_object,
    special_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle.export.gguf_file import Fact

_PREFIX: Final = "tokenizer.ggml."
"""Keys of the metadata about the tokenizer begin with this."""


def vocabulary(folder: Path, size: int) -> dict[str, Fact]:
    """Return the tokenizer of a folder, as metadata of a GGUF file.

    Args:
        folder: the folder with `tokenizer.json`.
        size: the number of rows of the model's embedding.

    Raises:
        ConfigError: llama.cpp does not read this kind of tokenizer, or the tokenizer has more
            tokens than `size`.
        MissingFileError: there is no `tokenizer.json`.
        WeightsFormatError: a file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFileError(f"export: there is no file {path}, which the GGUF file needs")
    tokenizer = read_object(path)
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise ConfigError(f"export: {path} is of the kind {model['type']}, expected BPE")
    ids: dict[str, int] = dict(model["vocab"])
    # llama.cpp has these types of tokens: NORMAL, CONTROL (special), USER (added, not special),
    # UNUSED, BYTE.
    type_of = dict.fromkeys(ids, NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        ids[added["content"]] = added["id"]
        type_of[added["content"]] = CONTROL if added.get("special") else USER
    if max(ids.values()) >= size:
        raise ConfigError(
            f"export: {path} has token ids up to {max(ids.values())}, expected below {size}, the "
            "number of rows of the model's embedding"
        )
    # The embedding may have rows without a token, but the file needs a token for every row.
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    # Only tokenizers that were converted from SentencePiece fall back to bytes.
    is_sentencepiece = bool(model.get("byte_fallback"))
    for token, number in ids.items():
        tokens[number] = token
        is_byte = is_sentencepiece and len(token) == len("<0x00>") and token.startswith("<0x")
        types[number] = BYTE if is_byte else type_of[token]
    facts: dict[str, Fact] = {
        f"{_PREFIX}model": "llama" if is_sentencepiece else "gpt2",
        f"{_PREFIX}tokens": list(tokens),
        f"{_PREFIX}token_type": list(types),
    }
    if is_sentencepiece:
        # llama.cpp applies the merge with the highest score first. Token ids rise in the order of
        # the merges, so a token's score is its negative id.
        facts[f"{_PREFIX}scores"] = [-float(number) for number in range(size)]
    else:
        facts[f"{_PREFIX}pre"] = _pre_tokenizer(tokenizer, str(path))
        merges = model["merges"]
        facts[f"{_PREFIX}merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return facts | _special(folder, ids, str(tokenizer.get("post_processor")))


def _special(folder: Path, ids: Mapping[str, int], post_processor: str) -> dict[str, Fact]:
    """Return metadata: ids of special tokens, whether texts begin with BOS, and chat templates.

    Args:
        folder: the folder with the tokenizer.
        ids: the id of each token.
        post_processor: the text of this entry of `tokenizer.json`; it names the tokens that it
            adds.

    Raises:
        WeightsFormatError: a file is damaged.
    """
    facts: dict[str, Fact] = {}
    config = read_object(folder / "tokenizer_config.json")
    named = special_tokens({**read_object(folder / "special_tokens_map.json"), **config})
    # `name` is transformers' name of a special token, such as `eos_token`; `key` is GGUF's, such as
    # `eos_token_id`.
    for name, key in NAMES.items():
        if named.get(name) in ids:
            facts[f"{_PREFIX}{key}"] = ids[named[name]]
    # llama.cpp ends texts at EOS and at EOT. A model may have several end tokens: EOT is the first
    # one that differs from EOS. If there is no EOS yet, the first end token becomes EOS.
    end = facts.get(f"{_PREFIX}eos_token_id")
    other_ends = [number for number in end_tokens(folder) if number != end]
    if other_ends:
        key = "eos_token_id" if end is None else "eot_token_id"
        facts[f"{_PREFIX}{key}"] = other_ends[0]
    bos = named.get("bos_token")
    facts[f"{_PREFIX}add_bos_token"] = bos is not None and bos in post_processor
    # By name. If there are any, one has the name DEFAULT: `chat_templates` checks this.
    templates = chat_templates(folder, config)
    others = sorted(templates.keys() - {DEFAULT})
    if templates:
        facts[TEMPLATE] = templates[DEFAULT]
    if others:
        facts[f"{TEMPLATE}s"] = list(others)
    return facts | {f"{TEMPLATE}.{name}": templates[name] for name in others}


def _pre_tokenizer(tokenizer: Mapping[str, Any], path: str) -> str:
    """Return llama.cpp's name of the tokenizer's pre-tokenizer, which splits text into words.

    Raises:
        ConfigError: llama.cpp's name of the pre-tokenizer is not known.
    """
    # A pre-tokenizer is a single step, or a sequence with a list of steps.
    given = tokenizer.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2
    if kinds == ["Digits", "ByteLevel"]:
        return SMOLLM
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex")
        # A name of `SPLITS` without a regular expression of its own has None.
        for name, known in SPLITS.items():
            if known is not None and known == pattern:
                return name
    raise ConfigError(
        f"export: llama.cpp's name of the pre-tokenizer in {path} is not known; leave out --gguf, "
        "and convert the folder that export writes with llama.cpp's convert_hf_to_gguf.py"
    )
