"""The tokenizer of a language model, as metadata of a GGUF file for llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.files import parse_json
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

_START: Final = "tokenizer.ggml."


def vocabulary(folder: Path, size: int) -> dict[str, Fact]:
    """Return the tokenizer of a folder, as metadata of a GGUF file.

    Args:
        folder: the folder with `tokenizer.json`.
        size: the number of rows of the model's embedding.

    Raises:
        ConfigError: llama.cpp does not read this kind of tokenizer, or the tokenizer has more
            tokens than `size`.
        MissingFileError, WeightsFormatError: a file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFileError(f"export: there is no file {path}, which the GGUF file needs")
    found = parse_json(path.read_text(encoding="utf-8"))
    model = found["model"]
    if model.get("type", "BPE") != "BPE":
        raise ConfigError(f"export: {path} is of the kind {model['type']}, expected BPE")
    numbers: dict[str, int] = dict(model["vocab"])
    kinds = dict.fromkeys(numbers, NORMAL)
    for token in found.get("added_tokens", ()):
        numbers[token["content"]] = token["id"]
        kinds[token["content"]] = CONTROL if token.get("special") else USER
    if max(numbers.values()) >= size:
        raise ConfigError(
            f"export: {path} has {max(numbers.values()) + 1} tokens, expected at most {size}, the "
            "rows of the model's embedding"
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    pieces = bool(model.get("byte_fallback"))
    for token, number in numbers.items():
        tokens[number] = token
        is_byte = pieces and len(token) == len("<0x00>") and token.startswith("<0x")
        types[number] = BYTE if is_byte else kinds[token]
    facts: dict[str, Fact] = {
        f"{_START}model": "llama" if pieces else "gpt2",
        f"{_START}tokens": list(tokens),
        f"{_START}token_type": list(types),
    }
    if pieces:
        # llama.cpp applies the merge with the highest score first. Token ids rise in the order of
        # the merges, so a token's score is its negative id.
        facts[f"{_START}scores"] = [-float(number) for number in range(size)]
    else:
        facts[f"{_START}pre"] = _split(found, str(path))
        merges = model["merges"]
        facts[f"{_START}merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
    return facts | _named(folder, numbers, str(found.get("post_processor")))


def _named(folder: Path, numbers: Mapping[str, int], post_processor: str) -> dict[str, Fact]:
    """Return the ids of named special tokens, whether texts begin with BOS, and chat templates."""
    facts: dict[str, Fact] = {}
    config = read_object(folder / "tokenizer_config.json")
    named = special_tokens({**read_object(folder / "special_tokens_map.json"), **config})
    for name, key in NAMES.items():
        if named.get(name) in numbers:
            facts[f"{_START}{key}"] = numbers[named[name]]
    end = facts.get(f"{_START}eos_token_id")
    ends = [number for number in end_tokens(folder) if number != end]
    if ends:
        facts[f"{_START}eot_token_id" if end is not None else f"{_START}eos_token_id"] = ends[0]
    first = named.get("bos_token")
    facts[f"{_START}add_bos_token"] = first is not None and first in post_processor
    templates = chat_templates(folder, config)
    others = sorted(templates.keys() - {DEFAULT})
    if templates:
        facts[TEMPLATE] = templates[DEFAULT]
    if others:
        facts[f"{TEMPLATE}s"] = list(others)
    return facts | {f"{TEMPLATE}.{name}": templates[name] for name in others}


def _split(found: Mapping[str, Any], path: str) -> str:
    """Return llama.cpp's name of the tokenizer's pre-tokenizer, which splits text into words.

    Raises:
        ConfigError: this project knows no llama.cpp name for the pre-tokenizer.
    """
    given = found.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2
    if kinds == ["Digits", "ByteLevel"]:
        return SMOLLM
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex")
        for name, known in SPLITS.items():
            if known is not None and known == pattern:
                return name
    raise ConfigError(
        f"export: {path} splits text in a way that llama.cpp has no known name for; convert the "
        "folder of --for merged with llama.cpp's convert_hf_to_gguf.py"
    )
