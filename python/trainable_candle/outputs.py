"""A run's output folder: its files, how to recognise it, and which adapter is its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import yaml

from trainable_candle.errors import DatasetError, MissingFileError
from trainable_candle.files import load_yaml

if TYPE_CHECKING:
    from pathlib import Path

# The names of the files: the settings, the log in two formats, and the plot of the loss.
CONFIG: Final = "config.yaml"
LOG: Final = "train.csv"
JSON_LOG: Final = "train.jsonl"
CURVE: Final = "loss.png"
ADAPTER: Final = "adapter"
"""The file stem of the finished adapter in a run without `--name`."""
_PEFT: Final = "adapter_config.json"
"""A file that every adapter folder in peft's format has."""
_STATE: Final = "state.json"
"""A file that every checkpoint folder has."""


def is_output(folder: Path) -> bool:
    """Return whether a folder has the config and both logs, which every run writes."""
    return all((folder / name).is_file() for name in (CONFIG, LOG, JSON_LOG))


def require_no_output(folder: Path) -> None:
    """Check that a folder of a data set is not the output of a run.

    Raises:
        DatasetError: a run has written to the folder.
    """
    if is_output(folder):
        raise DatasetError(
            f"dataset: {folder} is the output of a run (it has {CONFIG}, {LOG} and {JSON_LOG}), "
            "whose logs and images would be trained on; move the data to a folder of its own"
        )


def adapter_in(path: Path) -> Path:
    """Return the adapter that `path` names.

    This is the finished adapter if `path` is a run's output folder. A folder in peft's format, a
    file and a missing path are returned unchanged.

    Raises:
        MissingFileError: `path` is another folder, or the output folder of a run without a finished
            adapter; the message says what to give.
    """
    if not path.is_dir() or (path / _PEFT).exists():
        return path
    if is_output(path):
        finished = path / f"{_name(path) or ADAPTER}.safetensors"
        if finished.is_file():
            return finished
    if (path / _STATE).exists():
        found = f"a checkpoint, from which --resume continues; give an adapter in {path.parent}"
    elif files := sorted(file.name for file in path.glob("*.safetensors")):
        found = f"a folder without a finished adapter; give one of its files: {', '.join(files)}"
    else:
        found = "a folder without adapters; give an adapter file, or the output folder of a run"
    raise MissingFileError(f"{path} is {found}")


def _name(folder: Path) -> str | None:
    """Return the setting `name` of an output folder's run; None if it is not set or unreadable."""
    try:
        values = load_yaml((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = values.get("name") if isinstance(values, dict) else None
    return name if isinstance(name, str) else None
