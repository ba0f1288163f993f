"""A few damaged files for each reader; `run.py --cases` makes more."""

import subprocess
import sys
from pathlib import Path


def test_damaged_files_are_rejected_or_read() -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--cases", "150"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
