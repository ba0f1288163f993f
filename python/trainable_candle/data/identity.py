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
"""The file of remembered hashes."""
_FORMAT: Final = 1
_CHUNK: Final = 32 * 2**20
"""The number of bytes of a file that one task of the thread pool hashes."""
_PIECE: Final = 2**20
"""The number of bytes that a thread reads at once."""
_WORKERS: Final = min(16, os.cpu_count() or 1)
_REMEMBERED: Final = 1000
"""The greatest number of files whose hashes are remembered."""
SETTLED: Final = 2_000_000_000
"""A time in nanoseconds: if at least this time is between two changes of a file, every file system
gives them different timestamps."""


def file_identity(path: str | Path) -> str:
    """Return a hash of a file's contents, or of all model files below a folder.

    The hash has 32 hexadecimal digits and depends on every byte. Several threads hash chunks of a
    file. A file's hash is remembered with the file's path, size, times, inode and device; while
    these are the same, the file is not read again.

    Args:
        path: a file of any kind, or a folder. In a folder and below it, all files with one of
            `SUFFIXES` are hashed together with their names.

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(path).expanduser()
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    digest = hashlib.blake2b(digest_size=16)
    for file, content in zip(files, content_digests(files), strict=True):
        name = os.fsencode(file.relative_to(path))
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
    before = [_state(file) for file in files]
    names = [os.path.realpath(file) for file in files]
    found: dict[str, str] = {}
    for name, state in zip(names, before, strict=True):
        entry = known.get(name)
        if isinstance(entry, list) and entry[:-1] == state and isinstance(entry[-1], str):
            found[name] = entry[-1]
    missing = {
        name: state[0] for name, state in zip(names, before, strict=True) if name not in found
    }
    if missing:
        found.update(_hashed(missing))
        fresh = {
            name: [*state, found[name]]
            for name, file, state in zip(names, files, before, strict=True)
            # A file that was changed less than `SETTLED` ago could change again and have the same
            # timestamps.
            if name in missing and now - max(state[1:3]) > SETTLED and _state(file) == state
        }
        _remember(memory, fresh)
    return [found[name] for name in names]


def user_folder() -> Path:
    """Return the library's cache folder, in `$XDG_CACHE_HOME` or `~/.cache`."""
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
        sizes: the sizes of the files, in bytes, by their names.

    Returns:
        The hashes, by the files' names.
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
    # Processors have instructions for SHA-256, which make it about twice as fast as other hashes.
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE))
    with Path(name).open("rb", buffering=0) as file:
        file.seek(start)
        left = _CHUNK
        while left and (count := file.readinto(piece[: min(left, _PIECE)])):
            digest.update(piece[:count])
            left -= count
    return digest.digest()


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        whole = parse_json(memory.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    files = whole.get("files") if isinstance(whole, dict) else None
    return files if isinstance(files, dict) and whole.get("format") == _FORMAT else {}


def _remember(memory: Path, fresh: Mapping[str, Sequence[Any]]) -> None:
    """Save hashes. A failure is ignored, because saved hashes only save time."""
    if not fresh:
        return
    # Read the file again: another process may have added hashes in the meantime.
    known = {name: entry for name, entry in _remembered(memory).items() if name not in fresh}
    entries = list({**known, **fresh}.items())[-_REMEMBERED:]
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "files": dict(entries)}, indent=0)
        write_atomically(memory, text, sync=False)
