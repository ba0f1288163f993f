"""Reads a `dataset` setting: a folder, or a list of folders with their settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from trainable_candle.data.captions import METADATA
from trainable_candle.data.options import Source
from trainable_candle.data.pixels import SUFFIXES
from trainable_candle.errors import ConfigError, DatasetError
from trainable_candle.files import load_yaml
from trainable_candle.outputs import require_no_output
from trainable_candle.settings.data import YAML_SUFFIXES

_SYNONYMS: Final = {
    "image_dir": "path",
    "folder_path": "path",
    "num_repeats": "repeats",
    "is_reg": "regularization",
    "class_tokens": "caption",
}
"""The fields of `Source` by their names in kohya's and ai-toolkit's lists of folders."""
_KOHYA_FOLDER: Final = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""Folder names of kohya's scripts: the number of repeats, `_`, and the class."""


def parse_sources(
    dataset: str | Path | Sequence[Any], caption: str | None = None
) -> tuple[Source, ...]:
    """Return the folders that a `dataset` setting names.

    As in kohya's scripts, a folder that has neither images nor a metadata file is replaced by those
    folders inside it whose names are like `10_a cup`, if there are any. Their `repeats` is then 10,
    and the caption of their images without one is `a cup`, unless the entry of the outer folder or
    the argument `caption` gives a caption. A folder is not replaced if its entry sets `repeats` or
    `recursive`.

    Args:
        dataset: a folder; a YAML file with a list of entries; or such a list. An entry is a folder
            or a mapping of the fields of `Source`. Relative folders in a file are relative to the
            file.
        caption: the caption of images that have none, for entries without a `caption` of their own.

    Raises:
        ConfigError: there is no entry, or an entry is wrong; the message says which, and why.
        DatasetError: the YAML file cannot be read or holds no list, `dataset` is a file of another
            type, or a folder is the output of a run.
        OSError: a folder cannot be listed.
    """
    base, where = Path(), "dataset"
    if isinstance(dataset, (str, Path)):
        path = Path(dataset).expanduser()
        if path.suffix.lower() not in YAML_SUFFIXES or path.is_dir():
            if path.is_file():
                raise DatasetError(
                    f"dataset: {path} is a file, expected a folder of images, or a YAML file that "
                    "lists folders"
                )
            return _replaced_by_kohya_folders(Source(path, caption), where)
        base, where, entries = path.parent, f"dataset: {path}", _read_entries(path)
    else:
        entries = list(dataset)
    if not entries:
        raise ConfigError(f"{where}: no folder is given")
    found: list[Source] = []
    for number, entry in enumerate(entries, 1):
        place = f"{where}: entry {number}"
        source = _source(entry, caption, base, place)
        if source in found:
            raise ConfigError(f"{place} is {source.path} again; give `repeats: 2` to see it twice")
        found.append(source)
    return tuple(
        folder
        for number, source in enumerate(found, 1)
        for folder in _replaced_by_kohya_folders(source, f"{where}: entry {number}")
    )


def _replaced_by_kohya_folders(source: Source, where: str) -> tuple[Source, ...]:
    """Replace a source by the folders inside it whose names give repeats and class.

    Return the source alone if there are no such folders, if it has images or a metadata file, or if
    it sets `repeats` or `recursive`. `where` is the start of error messages.

    Raises:
        DatasetError: the folder is the output of a run.
        ConfigError: a name gives 0 repeats, or both the folder and such a folder inside it hold
            images.
        OSError: a folder cannot be listed.
    """
    require_no_output(source.path)
    if source.recursive or source.repeats is not None or not source.path.is_dir():
        return (source,)
    with os.scandir(source.path) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    if any(entry.name == METADATA for entry in inside):
        return (source,)  # The metadata file names images, which may be in folders below.
    folders = [
        (entry.name, match)
        for entry in inside
        if (match := _KOHYA_FOLDER.fullmatch(entry.name)) and entry.is_dir()
    ]
    if _has_images(source.path):
        ignored = [name for name, _ in folders if _has_images(source.path / name)]
        if ignored:
            raise ConfigError(
                f"{where}: {source.path} holds images, and so do its folders {', '.join(ignored)}; "
                "move all images into such folders, or list the folders in a YAML file"
            )
        return (source,)
    try:
        return tuple(
            replace(
                source,
                path=source.path / name,
                repeats=int(match[1]),
                caption=match[2].strip() if source.caption is None else source.caption,
            )
            for name, match in folders
        ) or (source,)
    except ConfigError as error:  # `Source` rejects 0 repeats.
        reason = str(error).removeprefix("dataset: ")
        names = ", ".join(name for name, _ in folders)
        raise ConfigError(f"{where}: {source.path}: {reason}, in the names {names}") from None


def _has_images(folder: Path) -> bool:
    """Return whether a folder itself, not one inside it, has files with suffixes of images."""
    with os.scandir(folder) as entries:
        return any(Path(entry.name).suffix.lower() in SUFFIXES for entry in entries)


def _read_entries(path: Path) -> list[Any]:
    """Return the list in a YAML file; it may be under the key `dataset` or `datasets`.

    Raises:
        DatasetError: the file cannot be read, is not valid YAML, or holds no list.
    """
    try:
        entries = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(f"dataset: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an impossible date
        raise DatasetError(f"dataset: {path} is not valid YAML: {error}") from error
    if isinstance(entries, dict) and set(entries) in ({"dataset"}, {"datasets"}):
        (entries,) = entries.values()
    if not isinstance(entries, list):
        raise DatasetError(f"dataset: {path} holds no list; expected `- path: FOLDER` entries")
    return entries


def _source(entry: Any, caption: str | None, base: Path, where: str) -> Source:
    """Return the source that an entry of the list describes.

    Args:
        entry: the entry.
        caption: the default of the field `caption`.
        base: the folder that relative paths start from.
        where: the start of error messages.

    Raises:
        ConfigError: the entry is wrong.
    """
    values = {"path": entry} if isinstance(entry, (str, Path)) else entry
    if isinstance(values, Mapping):
        values = _renamed(values, where)
    if not isinstance(values, Mapping) or "path" not in values:
        raise ConfigError(
            f"{where} is {entry!r}, expected a folder, or `path: FOLDER` and settings"
        )
    known = [field.name for field in fields(Source)]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise ConfigError(f"{where}: `{unknown[0]}` is unknown, expected one of {', '.join(known)}")
    try:
        source = Source(**{"caption": caption, **values})
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('dataset: ')}") from None
    return replace(source, path=base / source.path)


def _renamed(values: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Return the fields of an entry, with synonyms replaced by the names of the fields of `Source`.

    Raises:
        ConfigError: two names mean the same field.
    """
    renamed: dict[Any, Any] = {}
    written: dict[Any, Any] = {}  # the key of each field as the entry has it
    for key, value in values.items():
        name = _SYNONYMS.get(key, key)
        if name in renamed:
            raise ConfigError(
                f"{where}: `{written[name]}` and `{key}` mean the same; give one of them"
            )
        renamed[name], written[name] = value, key
    return renamed
