"""Paths in settings files. They are relative to the file's folder, so that a run can be moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.hub import is_name

if TYPE_CHECKING:
    from collections.abc import Callable

LATEST: Final = "latest"
"""The value of `resume` that means the last checkpoint in the output folder."""
AUTO: Final = "auto"
"""The value of `resume` that means the last checkpoint, or a new start if there is none.

Job schedulers can then repeat the same command.
"""
PROMPT_ENDINGS: Final = (".txt",)
"""Endings of prompt files. The path of such a file may be given in place of a prompt."""


def paths_from_file(name: str, value: Any, folder: Path) -> Any:
    """Make paths that are relative to a settings file's folder relative to the current folder.

    If `folder` is absolute, the paths become absolute. Absolute paths and paths that begin with
    `~` do not change, nor do values that are not paths: `latest` and `auto` of `resume`, names of
    models on the hub, and prompts.

    Args:
        name: the name of a setting with paths.
        value: a text or a list of texts; anything else is returned unchanged.
        folder: the folder of the file.
    """

    def change(text: str) -> str:
        joined = folder / text
        if name == "weights" and is_name(text) and not joined.exists():
            return text  # the name of a model on the hub
        without_dots = Path(os.path.normpath(joined))
        # Remove `..` only if the path then leads to the same file. It may lead to another file if
        # a part of the path is a symbolic link.
        is_same = os.path.realpath(without_dots) == os.path.realpath(joined)
        return str(without_dots if is_same else joined)

    return _each(name, value, change)


def paths_for_file(name: str, value: Any, folder: Path) -> Any:
    """Make paths relative to `folder`, the folder of a settings file; inverts `paths_from_file`.

    Absolute paths and paths that begin with `~` do not change, except for the path in `output`: the
    output folder moves with the file.
    """

    def change(text: str) -> str:
        if name == "weights" and is_name(text):
            return text  # the name of a model on the hub
        return os.path.relpath(os.path.realpath(text), os.path.realpath(folder))

    if name == "output" and isinstance(value, str) and value:
        return change(str(Path(value).expanduser()))
    return _each(name, value, change)


def is_prompt_file(text: str) -> bool:
    """Return whether a text given as a prompt is the path of a prompt file, by its ending."""
    return text.lower().endswith(PROMPT_ENDINGS)


def _each(name: str, value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to each relative path, and to nothing else."""

    def changed(item: Any) -> Any:
        if not isinstance(item, str) or not item or item.startswith("~") or os.path.isabs(item):  # noqa: PTH117 - a text
            return item
        if name == "resume" and item in {LATEST, AUTO}:
            return item
        if name == "sample_prompts" and not is_prompt_file(item):
            return item
        return change(item)

    return [changed(item) for item in value] if isinstance(value, list) else changed(value)
