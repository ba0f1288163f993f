"""The cache of encoded images and captions on disk.

Readers find an entry by its key and get either the complete entry or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle.data.entries import facts_of, intact_facts, packed
from trainable_candle.errors import ConfigError, FileError, WeightsFormatError
from trainable_candle.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.data.options import CacheOptions, DatasetOptions

FOLDER: Final = ".trainable-candle"
_FORMAT: Final = 3
"""The version of the entries' contents, which is one of the settings of every store."""
_SUFFIX: Final = ".safetensors"
_ADVICE: Final = (
    "free disk space, or use --cache-dir FOLDER or --cache memory; entries already written are kept"
)
_ABANDONED: Final = 3600.0
"""The age, in seconds, above which an unfinished file counts as abandoned and is deleted."""


def cache_folder(
    cache: CacheOptions, dataset: DatasetOptions, output: Path | None
) -> tuple[Path | None, str | None]:
    """Choose the folder of the cache.

    Args:
        cache: whether to keep files, and where.
        dataset: the data set; by default, the cache is in a subfolder of its first folder.
        output: the run's folder; the cache is in a subfolder of this folder if the data set's first
            folder cannot be written to. None if the run has no folder.

    Returns:
        Two values. The first is the cache's folder, which exists and can be written to, or None if
        the cache is not on disk. The second is a message that tells why the cache is in the run's
        folder, or None if the cache is elsewhere.

    Raises:
        ConfigError: the folder that `cache` names cannot be written to; or it names none, and
            neither the data set's folder nor the run's can be written to.
    """
    if cache.kind != "disk":
        return None, None
    if cache.folder is not None:
        return _writable(cache.folder.expanduser()), None
    try:
        return _writable(dataset.sources[0].path / FOLDER), None
    except ConfigError as error:
        if output is None:
            raise
        in_output = _writable(output / FOLDER)
        return in_output, f"{error}; the cache is in {in_output} instead"


def _writable(folder: Path) -> Path:
    """Make a folder, if there is none, and check that files can be written to it; return it.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    probe = folder / f".{os.getpid()}-{secrets.token_hex(4)}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cache: {folder} cannot be written to: {error.strerror}") from error
    return folder


def fingerprint(facts: Mapping[str, object]) -> str:
    """Return the BLAKE2b hash of `facts`, 32 hexadecimal digits; the order of keys is ignored."""
    text = json.dumps(facts, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class FeatureStore:
    """A folder of tensors by key, for one kind of entry and one set of settings.

    Entries are in `KIND-SETTINGS/KEY.safetensors`, so that runs with different settings, and
    several processes, can share a folder. Each entry is written to a file with a temporary name,
    which is then renamed, so that readers never see an incomplete entry.

    Args:
        folder: the folder of all kinds and settings.
        kind: what is encoded, `latents` or `text`.
        settings: everything that an entry depends on besides its key.

    Raises:
        OSError: the folder cannot be made, listed or written to.
    """

    def __init__(self, folder: Path, kind: str, settings: Mapping[str, object]) -> None:
        all_settings = {"format": _FORMAT, **settings}
        self.folder = folder / f"{kind}-{fingerprint(all_settings)[:16]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        settings_file = self.folder / "settings.json"
        if not settings_file.exists():
            text = json.dumps(all_settings, indent=2, default=str) + "\n"
            write_atomically(settings_file, text)
        for path in self.folder.glob("*.partial"):
            # Another process may rename or delete the file after `glob` has listed it.
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()

    def holds(self, key: str) -> bool:
        """Return whether there is an entry with this key and a correct checksum."""
        # `intact_facts` returns no facts if the checksum is wrong.
        return intact_facts(self._path(key)).get("key") == key

    def read(self, key: str, device: str) -> dict[str, Tensor] | None:
        """Return an entry on a device, or None if it is missing or damaged.

        Raises:
            DeviceError, CudaUnavailableError: the device cannot be used.
        """
        if not self.holds(key):
            return None
        try:
            return tc.load_file(self._path(key), device)
        except (OSError, WeightsFormatError):
            return None

    def write(
        self, key: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None
    ) -> None:
        """Add or replace an entry.

        Args:
            key: the entry's key.
            tensors: the entry's tensors, by name.
            facts: texts about the entry, for people and for `remove_superseded`, which reads
                `source`, the path of a file, and `digest`, the digest of the file's content.

        Raises:
            FileError: the entry cannot be written; an existing one does not change.
        """
        self.put(key, packed(tensors, {**(facts or {}), "key": key}))

    def content(self, key: str) -> bytes:
        """Return the bytes of an entry's file, for `put` of another store.

        Raises:
            OSError: the file cannot be read.
        """
        return self._path(key).read_bytes()

    def put(self, key: str, content: bytes) -> None:
        """Add or replace an entry, given the bytes of its file, which `content` returns.

        Raises:
            FileError: the entry cannot be written; an existing one does not change.
        """
        path = self._path(key)
        try:
            # A folder in the entry's place would make the write fail.
            if path.is_dir():
                shutil.rmtree(path)
            # Syncing takes long and is not needed: the checksum finds entries that a power failure
            # has damaged.
            write_atomically(path, content, sync=False)
        except OSError as error:
            reason = f"the cache cannot be written: {error.strerror}; {_ADVICE}"
            raise FileError(error.errno, reason, str(path)) from error

    def remove_superseded(self, needed: set[str], digests: Mapping[str, str]) -> int:
        """Remove unreadable entries, and those whose source file has changed since they were made.

        Args:
            needed: the keys of entries that are kept without a check.
            digests: the digest of the current content of each source file, by the file's path.
                Entries of other files are kept.

        Returns:
            The number of removed entries.
        """
        removed = 0
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.stem in needed or not path.is_file():
                continue
            facts = facts_of(path)
            current = digests.get(facts.get("source", ""))
            if not facts or (current is not None and facts.get("digest") != current):
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"
