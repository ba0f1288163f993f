"""Reads the lines of a YAML file of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.files import load_yaml
from trainable_candle.outputs import CONFIG
from trainable_candle.settings.setting import described


def read_yaml(path: str | bytes | Path) -> dict[str, Any]:
    """Return the `name: value` lines of a YAML file, unchecked; an empty file has none.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: the file cannot be read, is not text in UTF-8 or not YAML, or does not consist
            of such lines.
    """
    path = Path(os.fsdecode(path)).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path}: there is no such configuration file") from None
    except IsADirectoryError:
        example = f", such as {path / CONFIG}" if (path / CONFIG).exists() else ""
        raise ConfigError(f"{path}: is a folder, expected a YAML file{example}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8: {error}") from error
    try:
        values = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise ConfigError(f"{path}: is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of `name: value`, found {described(values)}")
    return values
