"""Paths in files of settings: relative to the file, so that a folder of a run can be moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.hub import is_name

if TYPE_CHECKING:
    from collections.abc import Callable

LATEST: Final = "latest"
"""The last checkpoint of the output, as a value of `resume`."""
AUTO: Final = "auto"
"""The same if there is one, else none: for schedulers, which start a run with one command."""
PROMPTS: Final = (".txt",)
"""Endings of files of prompts, which may replace a prompt."""


def inward(name: str, value: Any, folder: Path) -> Any:
    """What a setting of a file in `folder` names, as seen from the present folder.

    Args:
        name: of a setting that holds paths.
        value: a text or a list of texts; anything else is returned as it is.
        folder: where the file is.
    """

    def change(text: str) -> str:
        joined = folder / text
        if name == "weights" and is_name(text) and not joined.exists():
            return text  # on the hub
        plain = Path(os.path.normpath(joined))
        # `..` after a link leads elsewhere than its text says.
        return str(plain if os.path.realpath(plain) == os.path.realpath(joined) else joined)

    return _each(name, value, change)


def outward(name: str, value: Any, folder: Path) -> Any:
    """The reverse: as a file in `folder` names what the setting names from the present folder.

    Absolute paths stay as they are, but for `output`, which is moved with the file.
    """

    def change(text: str) -> str:
        if name == "weights" and is_name(text):
            return text
        return os.path.relpath(os.path.realpath(text), os.path.realpath(folder))

    if name == "output" and isinstance(value, str) and value:
        return change(str(Path(value).expanduser()))
    return _each(name, value, change)


def is_prompts(text: str) -> bool:
    """Whether a prompt names a file of prompts."""
    return text.lower().endswith(PROMPTS)


def _each(name: str, value: Any, change: Callable[[str], str]) -> Any:
    def changed(text: Any) -> Any:
        if not isinstance(text, str) or not text or text.startswith("~") or os.path.isabs(text):  # noqa: PTH117 - a text
            return text
        if name == "resume" and text in {LATEST, AUTO}:
            return text
        if name == "sample_prompts" and not is_prompts(text):
            return text
        return change(text)

    return [changed(item) for item in value] if isinstance(value, list) else changed(value)
