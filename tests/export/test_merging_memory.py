"""Merging a language model holds one of its weight files in memory at a time."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

# Of each file, the only tensor has this many bytes.
SIZE = 32 << 20
# Prints by how many bytes the process grows at most while it merges an adapter without layers.
MERGE = """
import re, sys
from pathlib import Path
from trainable_candle.export import TextAdapter
from trainable_candle.export.merged import write_merged

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
write_merged(Path(sys.argv[1]), TextAdapter({}), Path(sys.argv[2]))
print(status("VmHWM") - before)
"""


def write_zeros(path: Path, name: str) -> None:
    """Write a sparse file with one tensor of `SIZE` bytes."""
    entry = {"dtype": "F32", "shape": [1024, SIZE // 4096], "data_offsets": [0, SIZE]}
    header = json.dumps({name: entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + SIZE)


@pytest.mark.parametrize("count", [1, 4])
def test_merging_holds_one_file_at_a_time(tmp_path: Path, count: int) -> None:
    (weights := tmp_path / "weights").mkdir()
    (output := tmp_path / "output").mkdir()
    names = {f"layer{n}.weight": f"model-{n}.safetensors" for n in range(count)}
    for name, file in names.items():
        write_zeros(weights / file, name)
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    command = [sys.executable, "-c", MERGE, str(weights), str(output)]
    found = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert SIZE <= found < 1.5 * SIZE
