#!/usr/bin/env python3
"""Check the extension that was built with CUDA.

It leaves nothing to CUDA's libraries when it is loaded, computes on the CPU, and says why there is
no CUDA where there is none. Usage: .ci/check_cuda.py EXTENSION
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
        raise AssertionError("a tensor on a device that is not there")
"""


def main(extension: str) -> None:
    """Put the extension into a copy of the package, and use that."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "trainable_candle"
        ignore = shutil.ignore_patterns("*.so")
        shutil.copytree(ROOT / "python" / "trainable_candle", package, ignore=ignore)
        shutil.copy(extension, package / "_core.abi3.so")
        environment = {**os.environ, "PYTHONPATH": folder}
        tests = "tests/repo/test_extension.py::test_extension_leaves_no_symbol_to_a_cuda_library"
        for command in (["-m", "pytest", "-q", tests], ["-c", USE]):
            subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
