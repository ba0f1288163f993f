"""The files beside a language model's weights: its tokenizer, chat templates and end tokens."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import WeightsFormatError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")  # fmt: skip
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""The name of the chat template for conversations with tools."""
_MORE_TEMPLATES: Final = "additional_chat_templates/*.jinja"
CONFIGS: Final = ("generation_config.json", "config.json")
"""The files that have ids of special tokens."""
FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    _MORE_TEMPLATES, "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model",
)  # fmt: skip
"""The files in a model's folder with its tokenizer and its settings for generation, as patterns."""


def copy_files(weights: Path, output: Path, *others: str) -> None:
    """Copy `FILES` and `others` to another folder, byte for byte; missing files are left out."""
    for pattern in (*FILES, *others):
        for path in weights.glob(pattern):
            copy = output / path.relative_to(weights)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file.

    Raises:
        WeightsFormatError: the file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise WeightsFormatError(f"tokenizer: {path} is not a JSON object")
    return content


def token_ids(config: Mapping[str, Any], name: str) -> list[int]:
    """Return the ids in the entry `name` of one of `CONFIGS`.

    The entry is an id, a list of ids, or absent. Some files have -1 for a token that the model
    lacks; negative ids are left out.
    """
    found = config.get(name)
    numbers = found if isinstance(found, list) else [found]
    return [number for number in numbers if isinstance(number, int) and number >= 0]


def end_tokens(folder: Path) -> list[int]:
    """Return the ids of the end tokens in a folder's `CONFIGS`."""
    configs = [read_object(folder / name) for name in CONFIGS]
    return [number for config in configs for number in token_ids(config, "eos_token_id")]


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens' texts by name; `config` has texts, or objects with `content`."""
    tokens = {}
    for name in _TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a folder's chat templates by name, as transformers finds them.

    If `chat_template.jinja` or files in `additional_chat_templates` exist, they are the templates.
    Otherwise the configuration has a template, which is called `default` here, or a list of
    templates with names.

    Args:
        folder: the folder with the tokenizer.
        config: the content of its `tokenizer_config.json`.

    Raises:
        WeightsFormatError: a file is not UTF-8, the configuration's entry is neither text nor such
            a list, or no template is called `default`.
    """
    paths = {path.stem: path for path in sorted(folder.glob(_MORE_TEMPLATES))}
    single = folder / "chat_template.jinja"
    if single.is_file():
        paths[DEFAULT] = single
    templates = {name: _template(path) for name, path in paths.items()}
    if not templates:
        templates = _configured(folder / "tokenizer_config.json", config.get("chat_template"))
    if templates and DEFAULT not in templates:
        raise WeightsFormatError(
            f"tokenizer: {folder} has the chat templates {', '.join(templates)}, expected one "
            f"called {DEFAULT}"
        )
    return templates


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error


def _configured(path: Path, found: Any) -> dict[str, str]:
    """Return the templates by name in the entry `chat_template` of the file `path`."""
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    templates: dict[str, str] = {}
    for entry in found if isinstance(found, list) else [found]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise WeightsFormatError(
                    f"tokenizer: {path} has a chat_template that is neither text nor a list of "
                    f"objects with name and template, but {found!r:.60}"
                )
    return templates
