"""If one of a run's processes fails, the other ends too and says why; the checkpoints remain."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainable_candle.distributed.launch import rank_environment
from trainable_candle.train.state import checkpoints, read_state

# A training script. After the first checkpoint, the largest file that the process may write has 0
# bytes, so every write fails with the error "File too large", much as on a full disk.
# Only rank 0 writes files.
FULL_DISK = """
import resource
import sys

from trainable_candle.distributed.world import from_environment
from trainable_candle.run import train_adapter
from trainable_candle.train import Callback, TrainConfig
from trainable_candle.train.state import checkpoints


class FullDisk(Callback):
    def on_step_end(self, trainer, report):
        if checkpoints(trainer.output):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


model, dataset, output = sys.argv[1:]
config = TrainConfig(
    model="digits", weights=model, dataset=dataset, output=output, device="cpu",
    steps=1_000_000, save_every=4, log_every=1_000_000,
)
train_adapter(config, callbacks=[FullDisk()], progress=False, world=from_environment())
"""


def test_a_full_disk_ends_all_processes(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    arguments = [str(digits_base), str(digits_folder), str(output)]
    # The processes meet at a socket in this folder; the path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", FULL_DISK, *arguments],
                env=rank_environment(Path(meeting), rank, size=2),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        error_0, error_1 = (process.communicate(timeout=60)[1] for process in processes)
    assert all(process.returncode for process in processes)
    assert "File too large" in error_0
    assert "DistributedError: distributed: rank 0: " in error_1
    assert "File too large" in error_1
    steps = [read_state(folder).step for folder in checkpoints(output)]
    assert steps
    assert all(step % 4 == 0 for step in steps)


# A training script in which a process counts as failed if it sends no message for 10 s.
SHORT_SILENCE = """
import sys

from trainable_candle.distributed import link
from trainable_candle.distributed.world import from_environment
from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig

link.SILENCE = 10.0
model, dataset, output = sys.argv[1:]
config = TrainConfig(
    model="digits", weights=model, dataset=dataset, output=output, device="cpu",
    steps=1_000_000, save_every=4, log_every=1_000_000,
)
train_adapter(config, progress=False, world=from_environment())
"""


def test_a_suspended_process_ends_the_other_process(
    digits_base: Path, digits_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    arguments = [str(digits_base), str(digits_folder), str(output)]
    # The processes meet at a socket in this folder; the path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SHORT_SILENCE, *arguments],
                env=rank_environment(Path(meeting), rank, size=2),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 60
        while not checkpoints(output) and time.monotonic() < deadline:
            time.sleep(0.05)
        # A suspended process keeps its connections open, but sends nothing.
        os.kill(processes[1].pid, signal.SIGSTOP)
        try:
            error = processes[0].communicate(timeout=60)[1]
        finally:
            processes[1].kill()
            processes[1].communicate()
    assert processes[0].returncode
    assert "DistributedError: distributed: rank 1 has not been heard from for " in error
    assert checkpoints(output)
