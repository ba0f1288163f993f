"""On a GPU, a probe finds how much host memory the driver pins, and frees all of it for the run.

The probe, `cuda_pinnable_bytes`, pins at most the wanted number of bytes; it returns how many it
could pin.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainable_candle as tc
from trainable_candle import _core

pytestmark = pytest.mark.gpu
GIB = 2**30


def available() -> int:
    """Return how many bytes of host memory are available."""
    found = tc.memory.available_bytes()
    assert found is not None
    return found


def test_a_probe_finds_that_all_wanted_memory_can_be_pinned_and_frees_it(gpu: str) -> None:
    before = available()
    # 3 GiB + 7 is no multiple of the size of a page: the result must not be rounded.
    for _ in range(2):
        assert _core.cuda_pinnable_bytes(gpu, 3 * GIB + 7) == 3 * GIB + 7
    # The 3 GiB of each probe are free again. Other processes may have taken up to 2 GiB meanwhile.
    assert available() > before - 2 * GIB


def test_the_environment_variable_limits_the_probe(gpu: str) -> None:
    # The wanted 1 GiB is more than the limit of 300,000,000 bytes.
    code = f"""
from trainable_candle import _core
print(_core.cuda_pinnable_bytes("{gpu}", {GIB}))
"""
    environment = {
        **os.environ,
        "TRAINABLE_CANDLE_PINNED_BYTES": "300000000",
        "PYTHONPATH": str(Path(tc.__file__).parents[1]),
    }
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) == 300_000_000
