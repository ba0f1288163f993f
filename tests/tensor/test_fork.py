"""After a fork, the child computes with threads of its own and frees the memory of its results."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import trainable_candle as tc

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def add(times):
    for _ in range(times):
        result = a + a
    return result

tc.set_num_threads(8)
a = tc.ones(512, 512)
add(10)
child = os.fork()
if child:
    # The parent exits with the status of its child.
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# The child's first additions start its threads and fill the caches of memory.
assert add(500).sum().item() == 2 * 512 * 512
before = resident_bytes()
add(5000)
grown = resident_bytes() - before
# A single result that is not freed has 1 MiB: 512 * 512 values of f32.
assert grown < 1 << 20, f"5000 additions in a forked process left {grown} bytes behind"
assert len(os.listdir("/proc/self/task")) > 1, "the forked process has no threads of its own"
tc.set_num_threads(2)
assert add(1).sum().item() == 2 * 512 * 512
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_forked_process_computes_with_its_own_threads_and_leaks_nothing():
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
