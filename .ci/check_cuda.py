#!/usr/bin/env python3
"""Check the wheel that was built with CUDA: `.ci/check_cuda.py WHEEL`.

The package must load without the CUDA libraries, compute on the CPU, give the reason where CUDA is
unavailable, and pass the tests on a simulated device.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/cuda", "tests/repo/test_extension.py")
USE = """
import trainable_candle as tc

assert (tc.ones(2) + 1).tolist() == [2.0, 2.0]
reason = tc.cuda.unavailable_reason()
print("CUDA:", reason or "available")
assert tc.info()["reason"] == reason
assert reason != "this build has no CUDA support"
if reason:
    try:
        tc.zeros(1, device="cuda")
    except tc.CudaUnavailableError as error:
        assert reason in str(error), error
    else:
        raise AssertionError("tc.zeros made a tensor on an unavailable device")
"""


def main(wheel: str) -> None:
    """Run the checks on the files of the wheel, not on an installed package."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {**os.environ, "PYTHONPATH": folder}
        for command in (["-c", USE], ["-m", "pytest", "--numprocesses", "2", *TESTS]):
            subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
