"""Writes files completely or not at all, holds lock files, and reads YAML, JSON and metadata."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import yaml

from trainable_candle.errors import ConfigError, WeightsFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TOO_DEEP: Final = "its values are nested too deeply"
"""The reason in the error about a YAML or JSON document."""
_LARGEST_HEADER: Final = 100_000_000
"""The most bytes of a safetensors file's header, as in the safetensors library."""


def write_atomically(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write a file under a temporary name and rename it to `path`.

    Args:
        path: the file; an existing file is replaced.
        content: bytes, or text, which is written as UTF-8.
        sync: whether the file must survive a power failure. A file that is not synced may be empty
            or damaged after a power failure.

    Raises:
        OSError: the file cannot be written, and an existing file is unchanged; or the file is
            written, but its folder cannot be synced.
    """
    data = content.encode() if isinstance(content, str) else content
    # Processes on different machines or in different containers may have the same pid.
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}.{unique}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # Name the requested file, not the temporary one.
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise
    if sync:
        sync_folder(path.parent)


_SPECIAL_KEYS: Final = {"tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}
"""The tags of the keys `<<`, which inserts the entries of other mappings, and `=`."""


class _UniqueKeys(yaml.SafeLoader):
    """Loads YAML's plain values (no Python objects); rejects a mapping that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dict of a YAML mapping as `SafeLoader` does, after a check of its keys.

        Raises:
            yaml.YAMLError: a key occurs twice, or cannot be a key of a dict.
        """
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                # Compare values as a dict does, for which `1` and `1.0` are the same key. A special
                # key has no value of its own; the tuple with its tag equals no other key's value.
                is_special = key.tag in _SPECIAL_KEYS
                value = (key.tag,) if is_special else self.construct_object(key)
                if not isinstance(value, Hashable):
                    continue  # `SafeLoader` rejects the key.
                if value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"`{key.value}` is given twice", key.start_mark
                    )
                seen.add(value)
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML document of plain values.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or a mapping has a key twice.
        ValueError: the values are nested too deeply, or a value such as a date is out of range.
    """
    try:
        return yaml.load(text, _UniqueKeys)  # noqa: S506 - a safe loader
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: the text is not JSON, or its values are nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        WeightsFormatError: the file is not JSON, or not an object; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise WeightsFormatError(f"{path}: is not JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise WeightsFormatError(f"{path}: expected a JSON object; download it again")
    return content


@contextmanager
def held(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file within the context, and remove the file at the end.

    If the process dies, the operating system releases the lock; the file remains. On a file system
    without locks, nothing is locked.

    Args:
        path: the lock file, in a folder that exists.
        refusal: the start of the error's message, such as `output: run is in use`; ` by process`
            and the process's id follow.

    Raises:
        ConfigError: another process or thread holds the lock; the message has the process's id.
        OSError: the file cannot be created or locked.
    """
    handle = _lock(path, refusal)
    try:
        yield
    finally:
        # Remove the file before unlocking. In the other order, another process could lock the file
        # between the two, and would then hold a lock on a removed file.
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path, refusal: str) -> int:
    """Create and lock a file, write this process's id into it, and return its descriptor."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _try_lock(handle)
            # If the lock's previous owner removed the file after it was opened here, open anew.
            if _is_named(handle, path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
                return handle
        except BlockingIOError:
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            holder = f"process {pid}" if pid else "another process"
            raise ConfigError(
                f"{refusal} by {holder}; wait for it, or choose another folder"
            ) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_lock(handle: int) -> None:
    """Lock an open file if its file system supports locks; some file systems of clusters do not.

    Raises:
        BlockingIOError: another process or thread holds the lock.
        OSError: the file cannot be locked.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}:
            raise


def _is_named(handle: int, path: Path) -> bool:
    """Return whether `path` names the open file; False if that file was removed."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new and renamed files in it survive a power failure.

    Raises:
        OSError: the file system reports a failure.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in a safetensors file's header; empty if the header has none.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a safetensors file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LARGEST_HEADER:
            raise ValueError(f"{path}: is not a safetensors file")
        header = parse_json(file.read(size))
    match header:
        case {"__metadata__": dict(entries)}:
            return {str(name): str(text) for name, text in entries.items()}
        case dict() if header.get("__metadata__") is None:
            return {}
    raise ValueError(f"{path}: is not a safetensors file")
