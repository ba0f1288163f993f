"""Hashes of weights and configuration files, computed once and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.files import parse_json, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUFFIXES: Final = (".safetensors", ".gguf", ".json", ".txt", ".model")
"""The suffixes of a model's files: weights, configurations and vocabularies."""
MEMORY: Final = "contents.json"
"""The file of remembered hashes in `user_folder`."""
_FORMAT: Final = 1
"""The version of the format of `MEMORY`; files of other versions are ignored."""
_CHUNK: Final = 32 * 2**20
"""The number of bytes of a file that one task of the thread pool hashes."""
_PIECE: Final = 2**20
"""The number of bytes that a thread reads at once."""
_WORKERS: Final = min(16, os.cpu_count() or 1)
_REMEMBERED: Final = 1000
"""The greatest number of files whose hashes are remembered."""
SETTLED: Final = 2_000_000_000
"""A time in nanoseconds. If two changes of a file are farther apart, every file system gives them
different timestamps."""


def file_identity(path: str | Path) -> str:
    """Return a hash of a file's contents, or of all files of a model in a folder and below it.

    The hash has 32 hexadecimal digits and depends on every byte. Several threads hash chunks of a
    file. A file's hash is remembered with the file's path, size, times, inode and device; while
    these are the same, the file is not read again.

    Args:
        path: a file with any suffix, or a folder. In a folder and below it, the files with
            one of `SUFFIXES` count, and so do their paths relative to the folder.

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(path).expanduser()
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()
        )
    digest = hashlib.blake2b(digest_size=16)
    for file, content in zip(files, content_digests(files), strict=True):
        name = os.fsencode(file.relative_to(path))  # "." if `path` is a file
        digest.update(b"%d:%s:%s" % (len(name), name, content.encode()))
    return digest.hexdigest()


def content_digests(files: Sequence[Path]) -> list[str]:
    """Return a hash of each file's contents; files whose hash is remembered are not read.

    Raises:
        OSError: a file cannot be read.
    """
    memory = user_folder() / MEMORY
    known = _remembered(memory)
    now = time.time_ns()
    states = [_state(file) for file in files]  # before the files are read
    names = [os.path.realpath(file) for file in files]
    found: dict[str, str] = {}
    for name, state in zip(names, states, strict=True):
        entry = known.get(name)  # The state of the file, followed by its hash.
        if isinstance(entry, list) and entry[:-1] == state and isinstance(entry[-1], str):
            found[name] = entry[-1]
    # The sizes of the files to hash; `state[0]` is the size.
    sizes = {name: state[0] for name, state in zip(names, states, strict=True) if name not in found}
    if sizes:
        found.update(_hashed(sizes))
        fresh = {
            name: [*state, found[name]]
            for name, file, state in zip(names, files, states, strict=True)
            # Do not remember the hash of a file that changed while it was read, or less than
            # `SETTLED` ago: another change could give it the same timestamps. `state[1:3]` are
            # the file's mtime and ctime.
            if name in sizes and now - max(state[1:3]) > SETTLED and _state(file) == state
        }
        _remember(memory, fresh)
    return [found[name] for name in names]


def user_folder() -> Path:
    """Return the library's cache folder, in `$XDG_CACHE_HOME` or `~/.cache`.

    The variable counts only if it is an absolute path.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "trainable-candle"


def _state(file: Path) -> list[int]:
    """Return values that reveal a change of the file: size, mtime, ctime, inode, device."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _hashed(sizes: Mapping[str, int]) -> dict[str, str]:
    """Hash files: the hash of a file is the hash of its size and of the hashes of its chunks.

    Args:
        sizes: the sizes of the files, in bytes, by their paths.

    Returns:
        The hashes, by the files' paths.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        chunks = {
            name: [pool.submit(_chunk, name, start) for start in range(0, size, _CHUNK)]
            for name, size in sizes.items()
        }
        found = {}
        for name, parts in chunks.items():
            digest = hashlib.blake2b(b"%d" % sizes[name], digest_size=16)
            for part in parts:
                digest.update(part.result())
            found[name] = digest.hexdigest()
        return found


def _chunk(name: str, start: int) -> bytes:
    """Return the hash of the chunk of a file that begins at byte `start`."""
    # Processors have instructions for SHA-256, which make it about twice as fast as other hashes.
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE))
    with Path(name).open("rb", buffering=0) as file:
        file.seek(start)
        remaining = _CHUNK
        while remaining and (count := file.readinto(piece[: min(remaining, _PIECE)])):
            digest.update(piece[:count])
            remaining -= count
    return digest.digest()


def _remembered(memory: Path) -> dict[str, Any]:
    """Return the entries of the file `memory`, by path; none if it cannot be used."""
    try:
        content = parse_json(memory.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    files = content.get("files") if isinstance(content, dict) else None
    return files if isinstance(files, dict) and content.get("format") == _FORMAT else {}


def _remember(memory: Path, fresh: Mapping[str, Sequence[Any]]) -> None:
    """Add the entries `fresh` to the file `memory`, which keeps the latest entries.

    If the file cannot be written, nothing happens: the hashes are then computed again.
    """
    if not fresh:
        return
    # Read the file again: another process may have added entries in the meantime.
    # Old entries of files in `fresh` are left out, so that the new ones are the last.
    known = {name: entry for name, entry in _remembered(memory).items() if name not in fresh}
    entries = list({**known, **fresh}.items())[-_REMEMBERED:]
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "files": dict(entries)}, indent=0)
        write_atomically(memory, text, sync=False)
