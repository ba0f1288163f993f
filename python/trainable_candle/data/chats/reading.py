"""Files of examples for language models: JSON lines, JSON, CSV, Parquet, and folders of them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import hub
from trainable_candle.errors import DatasetError
from trainable_candle.files import parse_json
from trainable_candle.outputs import require_no_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet")
TRAIN: Final = ("train",)
"""The first words of the names of files for training."""
VALIDATION: Final = ("validation", "valid", "val", "dev")
"""The first words of the names of files for validation."""
_NESTED: Final = ("messages", "conversations", "tools", "tool_calls", "history", "prompt",
                  "completion", "chosen", "rejected")  # fmt: skip
"""The names of CSV columns in which a cell may be the JSON text of a list or an object."""


@dataclass(frozen=True)
class Row:
    """One line of a file, or one entry of a JSON list."""

    place: str
    """The file and the number of the line or entry, for messages: `chats.jsonl, line 7`."""
    values: dict[str, Any]
    """The values of the line's fields, by name."""


@dataclass(frozen=True)
class BadRow:
    """A line or an entry that cannot be read."""

    place: str
    """The file and the number of the line or entry, as in `Row`."""
    reason: str
    """The end of a sentence that begins with `place`: `is not JSON: ...`."""


def dataset_path(name: str) -> Path:
    """Return the file or folder that a setting names; a data set of the hub is downloaded.

    Args:
        name: a path, or "organisation/name" on the hub.

    Raises:
        MissingFileError: the hub has no such data set, or cannot be reached.
    """
    return hub.download_texts(name, SUFFIXES) if hub.is_name(name) else Path(name).expanduser()


def find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files for training and those for validation that a path names.

    Args:
        path: a file, which is for training, or a folder. In the folder and in its subfolder `data`,
            files with one of `SUFFIXES` are chosen by the first word of their names, such as
            `train` in `train-00000-of-00002.parquet`. If there are files with the first word
            `train`, these are for training, files with a first word of `VALIDATION` are for
            validation, and other files are not used. Without any `train` file, there is no
            validation: files with the first word `test` or a first word of `VALIDATION` are not
            used, and all others are for training. If there are no others, all files are for
            training.

    Raises:
        DatasetError: the path does not exist, has no file with one of `SUFFIXES`, or is the output
            folder of a run.
    """
    if not path.exists():
        raise DatasetError(f"dataset: there is no file or folder {path}")
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(f"dataset: {path} has none of the suffixes {', '.join(SUFFIXES)}")
        return [path], []
    folders = [path, path / "data"] if (path / "data").is_dir() else [path]
    for folder in folders:
        require_no_output(folder)
    files = sorted(
        file for folder in folders for file in folder.iterdir() if file.suffix.lower() in SUFFIXES
    )
    if not files:
        raise DatasetError(f"dataset: {path} has no file that ends in {', '.join(SUFFIXES)}")
    first_word = {file: file.stem.lower().replace("_", "-").split("-")[0] for file in files}
    train = [file for file in files if first_word[file] in TRAIN]
    if train:
        return train, [file for file in files if first_word[file] in VALIDATION]
    others = [file for file in files if first_word[file] not in {*VALIDATION, "test"}]
    return others or files, []


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yield the lines of a file, or the entries of a JSON list.

    Args:
        path: a file with one of `SUFFIXES`, which tells its format.

    Raises:
        DatasetError: the file as a whole cannot be read.
        ModuleNotFoundError: a Parquet file needs pyarrow.
    """
    try:
        yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        raise DatasetError(f"dataset: {path} cannot be read: {error.strerror or error}") from error


def _json_lines(path: Path) -> Iterator[Row | BadRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _object(f"{path.name}, line {number}", line)


def _object(place: str, line: bytes) -> Row | BadRow:
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        return BadRow(place, f"is not JSON: {error}")
    return _row(place, value)


def _row(place: str, value: Any) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(place, f"is {type(value).__name__}, expected an object with named fields")
    return Row(place, value)


def _json(path: Path) -> Iterator[Row | BadRow]:
    try:
        values = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DatasetError(
            f"dataset: {path} is not JSON: {error}; if each line is an object, name the file .jsonl"
        ) from error
    # An object with a single list, such as {"data": [...]}, stands for this list.
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else values
    if not isinstance(values, list):
        raise DatasetError(
            f"dataset: {path} is not a list of examples; expected [{{...}}, {{...}}], or an object "
            "with one such list"
        )
    for number, value in enumerate(values, 1):
        yield _row(f"{path.name}, entry {number}", value)


def _table(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(2**30)  # The default, 128 KiB, is too small for long texts.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for values in reader:
                place = f"{path.name}, line {reader.line_num}"
                # `DictReader` stores surplus fields under the key None, and missing fields with the
                # value None.
                if None in values or None in values.values():
                    yield BadRow(place, "has another number of fields than the first line")
                else:
                    yield Row(place, {name: _cell(name, text) for name, text in values.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            raise DatasetError(
                f"dataset: {path}, line {reader.line_num}: is not CSV in UTF-8: {error}"
            ) from error


def _cell(name: str, text: str) -> Any:
    """Return the value of a cell; parses JSON lists and objects in the columns `_NESTED`."""
    if name in _NESTED and text.lstrip().startswith(("[", "{")):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _parquet(path: Path) -> Iterator[Row | BadRow]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"dataset: {path} is Parquet, and pyarrow, which reads it, is not installed; "
            'run: pip install "trainable-candle[parquet]"',
            name=error.name,
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name}, row {number}", values)
    except ArrowException as error:
        raise DatasetError(f"dataset: {path} is not Parquet: {error}") from error


_READERS: Final[dict[str, Callable[[Path], Iterator[Row | BadRow]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _table,
    ".parquet": _parquet,
}
