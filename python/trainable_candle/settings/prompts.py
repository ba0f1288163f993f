"""Reads prompts from `.txt` files that a setting names in place of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.settings.paths import is_prompt_file

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNREAD: Final = (".toml", ".json")
"""Endings of prompt files that kohya's scripts read and this library does not."""


def expanded(prompts: Sequence[str], setting: str = "--sample-prompts") -> list[str]:
    """Return the prompts, with the lines of a `.txt` file in place of the file's path.

    Empty lines and lines that begin with `#` are left out.

    Args:
        prompts: prompts and paths of `.txt` files.
        setting: the flag that gives the prompts; messages begin with it.

    Raises:
        MissingFileError: there is no such `.txt` file.
        ConfigError: a `.txt` file has no prompt or cannot be read as text, or a prompt is the path
            of a `.toml` or `.json` file.
    """
    found: list[str] = []
    for prompt in prompts:
        if not is_prompt_file(prompt):
            if prompt.lower().endswith(_UNREAD) and Path(prompt).expanduser().is_file():
                raise ConfigError(
                    f"{setting}: prompts are not read from {prompt}; write a .txt file with one "
                    "prompt on each line"
                )
            found.append(prompt)
            continue
        path = Path(prompt).expanduser()
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except FileNotFoundError:
            raise MissingFileError(f"{setting}: there is no file {path}") from None
        except IsADirectoryError:
            raise ConfigError(f"{setting}: {path} is a folder, expected a file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{setting}: {path} cannot be read as text: {error}") from None
        stripped = [line.strip() for line in lines]
        in_file = [line for line in stripped if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"{setting}: {path} has no prompt; expected one on each line")
        found += in_file
    return found
