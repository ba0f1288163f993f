"""Entries of a cache of encoded images or texts, in memory, in files, or both.

They are encoded in groups and read one by one.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from trainable_candle.background import BackgroundWriter
from trainable_candle.data.cache import FeatureStore
from trainable_candle.data.entries import packed, unpacked
from trainable_candle.data.pixels import in_parallel
from trainable_candle.distributed.dealing import missing_anywhere, passed_on
from trainable_candle.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.data.options import CacheOptions
    from trainable_candle.distributed.group import Group

_Task = TypeVar("_Task")
_Input = TypeVar("_Input")

DEVICE_LIMIT: Final = 512 * 1024**2
"""The entries that stay on the device have at most this many bytes in all. Other entries are copied
to the device for each batch that needs them."""
MEMORY_LIMIT: Final = 2 * 1024**3
"""With a cache on disk, the entries that are also in memory have at most this many bytes in all, on
the host and the device together."""
PENDING: Final = 1
"""The greatest number of encoded groups that wait while the writer copies another group to the host
and writes it."""


class Entries:
    """Entries in memory, in files, or both.

    Args:
        options: where to keep entries (`options.kind`: on disk, in memory, or nowhere).
        kind: what is encoded, `latents` or `text`.
        identity: everything that entries depend on besides their keys.
        folder: the folder of all kinds and identities; needed if `options.kind` is `disk`.
        device: the device of batches.

    Raises:
        DatasetError: `folder` is needed, but None.
        OSError: the folder cannot be made or listed.
    """

    def __init__(
        self,
        options: CacheOptions,
        kind: str,
        identity: Mapping[str, str],
        folder: Path | None,
        device: str,
    ) -> None:
        self._kind = kind
        self._device = device
        self._store: FeatureStore | None = None
        if options.kind == "disk":
            if folder is None:
                raise DatasetError(
                    f"cache: entries of the kind {kind!r} on disk need a folder, and none is given"
                )
            self._store = FeatureStore(folder, kind, identity)
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._bytes = 0

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that have no entry, or a damaged one."""
        held = in_parallel(self._holds, keys)
        return [key for key, is_held in zip(keys, held, strict=True) if not is_held]

    def _holds(self, key: str) -> bool:
        return key in self._memory or (self._store is not None and self._store.holds(key))

    def fill(
        self,
        groups: Sequence[Sequence[_Task]],
        inputs: Iterable[_Input],
        encode: Callable[[_Input], Mapping[str, Tensor]],
        entry: Callable[[_Task], tuple[str, dict[str, str]]],
        done: Callable[[int], None],
    ) -> None:
        """Encode one group after the other, and add the entries in the background.

        Args:
            groups: groups of tasks; the tasks of a group are encoded together.
            inputs: yields the encoder's input for each group.
            encode: takes the input of a group; returns tensors with one row for each task.
            entry: returns the key of a task, and facts: texts that the file of its entry holds
                beside the tensors.
            done: called after each group with the number of its tasks.

        Raises:
            DatasetError: the encoder returns the wrong number of rows.
            OSError: an entry cannot be written.
        """
        writer = BackgroundWriter("cache", PENDING)
        try:
            for tasks, values in zip(groups, inputs, strict=True):
                encoded = encode(values)
                writer.submit(partial(self._add, list(map(entry, tasks)), encoded))
                done(len(tasks))
        except BaseException:
            # Finish writing earlier entries; raise this error even if writing fails.
            with suppress(Exception):
                writer.wait()
            raise
        writer.wait()

    def _add(
        self, entries: Sequence[tuple[str, Mapping[str, str]]], encoded: Mapping[str, Tensor]
    ) -> None:
        """Add entries, each with one row of the tensors, which a GPU may still be computing."""
        for (key, facts), row in zip(entries, _rows(encoded, len(entries)), strict=True):
            if self._store is not None:
                self._store.write(key, row, facts)
            self._remember(key, row)

    def pass_on(self, group: Group, keys: Sequence[str]) -> None:
        """Send entries to the processes that have them neither in memory nor on their disks.

        Args:
            group: the processes. Each of them must call this after it has made its own entries.
            keys: the keys of all entries that some process lacked before they were made (the result
                of `missing_anywhere`). This process has the entries of the keys with the indices
                `group.rank`, `group.rank + group.size` and so on, and sends them.

        Raises:
            OSError: an entry cannot be read or written.
            DistributedError: another process has failed.
        """
        if group.size == 1:
            return
        # Processes may share a disk, so this process looks for missing entries only after all
        # processes have made theirs.
        group.barrier()
        mine = keys[group.rank :: group.size]
        own = set(mine)
        missing_here = set(self.missing([key for key in keys if key not in own]))
        wanted = set(missing_anywhere(group, missing_here, keys))
        to_send = [key for key in mine if key in wanted]
        # All processes get the entries that all processes send.
        for content in passed_on(group, map(self._content, to_send)):
            tensors, facts = unpacked(content)
            key = facts["key"]
            if key in missing_here:
                if self._store is not None:
                    self._store.put(key, content)
                self._remember(key, tensors)

    def _content(self, key: str) -> bytes:
        if self._store is not None:
            return self._store.content(key)
        on_host = {name: tensor.to("cpu") for name, tensor in self._memory[key].items()}
        return packed(on_host, {"key": key})

    def get(self, key: str) -> dict[str, Tensor]:
        """Return the tensors of an entry, on the device.

        Raises:
            DatasetError: the entry is missing or damaged.
        """
        if key in self._memory:
            return self.placed(self._memory[key])
        tensors = self._store.read(key, self._device) if self._store is not None else None
        if tensors is None:
            where = f" in {self._store.folder}" if self._store is not None else ""
            raise DatasetError(
                f"cache: there is no intact entry {key} of the kind {self._kind!r}{where}; fill "
                "the cache before its batches are used, and leave it alone during training"
            )
        self._remember(key, tensors)
        return tensors

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the device of batches; those on another device are copied."""
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def remove_superseded(self, needed: set[str], digests: Mapping[str, str]) -> int:
        """Remove the files of entries whose source has changed since, and damaged files.

        Args:
            needed: the keys of entries that are kept without a check.
            digests: the digest of the current content of each source file, by the file's path.

        Returns:
            The number of removed files; 0 if entries have no files.
        """
        return 0 if self._store is None else self._store.remove_superseded(needed, digests)

    def _remember(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep an entry in memory, unless it has a file and memory would exceed `MEMORY_LIMIT`."""
        size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        if self._store is None or self._bytes + size <= MEMORY_LIMIT:
            device = self._device if self._bytes + size <= DEVICE_LIMIT else "cpu"
            self._memory[key] = {name: tensor.to(device) for name, tensor in tensors.items()}
            self._bytes += size


def _rows(encoded: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield each row of the encoded tensors, as tensors of one row on the host."""
    for name, tensor in encoded.items():
        if tensor.ndim == 0 or tensor.shape[0] != count:
            raise DatasetError(
                f"cache: the encoder was given {count} items and returned `{name}` of shape "
                f"{tuple(tensor.shape)}, expected ({count}, ...)"
            )
    # Copy whole tensors: copying one row takes as long as copying all rows.
    whole = {name: tensor.detach().to("cpu") for name, tensor in encoded.items()}
    for row in range(count):
        yield {name: tensor.narrow(0, row, 1).contiguous() for name, tensor in whole.items()}
