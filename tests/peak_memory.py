"""The memory by which a process grows, measured in a process of its own; and large sparse files."""

import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

READS_PROC = pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="reads Linux's /proc"
)
"""Mark of tests that call `growth`."""

_MEASURE = """
import re, sys
from pathlib import Path

def status(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{{name}}:\\s+(\\d+) kB", text)[1]) << 10

{setup}
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
{code}
print(status("VmHWM") - before)
"""


def growth(setup: str, code: str, *arguments: str) -> int:
    """Return the most bytes by which a new process grows while it runs `code`, after `setup`.

    `setup` has the imports, and what starts threads and fills caches. `setup` and `code` find
    `arguments` in `sys.argv[1:]`.
    """
    command = [sys.executable, "-c", _MEASURE.format(setup=setup, code=code), *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def write_zeros(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str) -> None:
    """Write tensors of zeros in "F32" or "BF16", by name, as a sparse safetensors file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + {"F32": 4, "BF16": 2}[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
