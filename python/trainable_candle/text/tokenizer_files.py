"""The files of a language model other than weights: tokenizer, chat templates, end tokens."""

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
"""The name of the chat template for conversations that no other template is for."""
TOOL_USE: Final = "tool_use"
"""The name of the chat template for conversations with tools."""
_MORE_TEMPLATES: Final = "additional_chat_templates/*.jinja"
"""The pattern of the files with further chat templates."""
CONFIGS: Final = ("generation_config.json", "config.json")
"""The files with ids of special tokens. If one id is needed, the first file that has it counts."""
FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    _MORE_TEMPLATES, "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model",
)  # fmt: skip
"""Patterns of the files that hold a model's tokenizer and its settings for generation."""


def copy_files(weights: Path, output: Path, *others: str) -> None:
    """Copy a model's files to another folder, byte for byte; missing files are left out.

    Args:
        weights: the folder of the model.
        output: the existing folder to copy to.
        others: patterns of files to copy in addition to `FILES`.

    Raises:
        OSError: a file cannot be copied.
    """
    for pattern in (*FILES, *others):
        for path in weights.glob(pattern):
            copy = output / path.relative_to(weights)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file.

    Raises:
        WeightsFormatError: the file cannot be read, or its content is not a JSON object.
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
    entry = config.get(name)
    numbers = entry if isinstance(entry, list) else [entry]
    return [number for number in numbers if isinstance(number, int) and number >= 0]


def end_tokens(folder: Path) -> list[int]:
    """Return the ids of the end tokens in all of a folder's `CONFIGS`; an id may occur twice.

    Raises:
        WeightsFormatError: a file is damaged.
    """
    configs = [read_object(folder / name) for name in CONFIGS]
    return [number for config in configs for number in token_ids(config, "eos_token_id")]


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens' texts by name.

    `config` has the entries of `special_tokens_map.json` and `tokenizer_config.json`. An entry is a
    text, or an object with the text as `content`.
    """
    tokens = {}
    for name in _TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a folder's chat templates by name, as transformers finds them; {} if there are none.

    The file `chat_template.jinja` is the template `default`; the files in
    `additional_chat_templates` have the names of their templates. If there are no such files, the
    entry `chat_template` of the configuration is the template `default`, or a list of templates
    with names.

    Args:
        folder: the folder with the tokenizer.
        config: the content of its `tokenizer_config.json`.

    Raises:
        WeightsFormatError: a file cannot be read as UTF-8, the configuration's entry is neither
            text nor such a list, or there are templates but none is called `default`.
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
    """Return the template in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsFormatError(f"tokenizer: {path} cannot be read: {error}") from error


def _configured(path: Path, entry: Any) -> dict[str, str]:
    """Return the templates by name in `entry`, the `chat_template` of the file `path`."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: entry}
    templates: dict[str, str] = {}
    for item in entry if isinstance(entry, list) else [entry]:
        match item:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise WeightsFormatError(
                    f"tokenizer: {path} has a chat_template that is neither text nor a list of "
                    f"objects with name and template, but {entry!r:.60}"
                )
    return templates
