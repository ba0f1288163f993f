"""Golden files that are stored compressed, so that the repository stays small."""

import functools
import gzip
import shutil
import tempfile
from pathlib import Path

_FOLDER = tempfile.TemporaryDirectory()
"""The folder of decompressed files. Python removes it at the end of the process."""


@functools.cache
def decompressed(path: Path) -> Path:
    """Decompress the file whose name is that of `path` and ".gz"; return the path of the result."""
    # The names of its two folders tell the file from others with the same name.
    result = Path(_FOLDER.name) / "-".join(path.parts[-3:])
    result.write_bytes(gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()))
    return result


@functools.cache
def model_folder(path: Path) -> Path:
    """Return `path`, the folder of a model, or a copy of it in which nothing is compressed."""
    compressed = list(path.glob("*.gz"))
    if not compressed:
        return path
    result = Path(_FOLDER.name) / "-".join(path.parts[-2:])
    shutil.copytree(path, result, ignore=shutil.ignore_patterns("*.gz"))
    for file in compressed:
        (result / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return result
