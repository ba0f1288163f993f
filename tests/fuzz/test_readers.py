"""Feed 150 damaged files to each reader of files in Python; `run.py --cases N` feeds N."""

import subprocess
import sys
from pathlib import Path


def test_readers_read_or_reject_damaged_files() -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--cases", "150"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
