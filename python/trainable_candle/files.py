"""Files that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under another name, sync it, rename it.

    Args:
        path: the file; one that exists is replaced.
        content: text is written as UTF-8.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # About the file that was asked for, not its temporary name.
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure.

    Raises:
        OSError: the file system reports a failure.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
