"""On a GPU, a probe finds how much memory the driver pins, and leaves all of it to the run."""

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
    found = tc.memory.available_bytes()
    assert found is not None
    return found


def test_a_probe_finds_that_all_wanted_memory_can_be_pinned_and_frees_it(gpu: str) -> None:
    before = available()
    for _ in range(2):
        assert _core.cuda_pinnable_bytes(gpu, 3 * GIB + 7) == 3 * GIB + 7
    # The 3 GiB of each probe are free again. Tests of other processes take some memory meanwhile.
    assert available() > before - 2 * GIB


def test_the_environment_variable_limits_the_probe(gpu: str) -> None:
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
