"""Start-up times on a GPU: the first LoRA step of a process, and loading a model onto the GPU.

python benches/gpu_start.py [--folder /tmp]

The step is that of `gpu_sdxl.py` at batch 1. Two new processes run it, one after the other: one
process starts with an empty driver cache of compiled kernels, the next with the cache that the
earlier process has filled. Another process then loads a saved model. The model is SDXL's full-size
UNet with random weights, in bf16. The use of host memory is read from Linux's /proc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpu_sdxl
import gpu_timing

import trainable_candle as tc

MIB = 2**20
FOLDER_HELP = "an existing folder with 5 GiB free (default: the folder of temporary files)"


def first_step(started: float) -> None:
    """Print the times from the start of this process to the end of the first step.

    Args:
        started: the `time.time()` at which the parent process started this one.
    """
    imported = time.time()
    # The first case of `gpu_sdxl.py` has batch 1 and no gradient checkpointing.
    step = gpu_sdxl.ours(gpu_sdxl.CASES[0], "cuda")
    tc.cuda.synchronize("cuda")
    built = time.time()
    step().item()
    done = time.time()
    parts = f"{imported - started:.2f} s to import, {built - imported:.2f} s to build the model"
    print(f"{done - started:.2f} s to the end of the first step: {parts}", flush=True)


def host_bytes(key: str) -> int:
    """Return the bytes of a line of /proc/self/status: VmRSS is resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def load(folder: str) -> None:
    """Print the time and memory of loading a saved model."""
    # The first calls start threads and load kernels, which is not a part of loading.
    tc.ones((1024, 1024), device="cuda").to("cpu")
    host_before, gpu_before = host_bytes("VmRSS"), tc.cuda.memory_stats("cuda")["allocated"]
    started = time.time()
    model = tc.models.SDXLUNet.from_pretrained(folder, "bf16", device="cuda")
    tc.cuda.synchronize("cuda")
    seconds = time.time() - started
    loaded = (tc.cuda.memory_stats("cuda")["allocated"] - gpu_before) / gpu_timing.GIB
    growth = (host_bytes("VmHWM") - host_before) / MIB
    print(
        f"{loaded:.2f} GiB loaded in {seconds:.2f} s; host memory grew by up to {growth:.0f} MiB",
        flush=True,
    )
    del model


def run_again(*arguments: str, **environment: str) -> None:
    """Run this script in a new process, with variables added to the environment."""
    command = [sys.executable, __file__, *arguments]
    subprocess.run(command, check=True, env=os.environ | environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help=FOLDER_HELP)
    parser.add_argument("--first-step", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step is not None:
        first_step(options.first_step)
        return
    if options.load is not None:
        load(options.load)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(2):
            run_again("--first-step", str(time.time()), CUDA_CACHE_PATH=f"{folder}/cache")
        model = tc.models.SDXLUNet.from_config(dtype="bf16", device="cuda")
        model.save_pretrained(f"{folder}/model")
        del model
        run_again("--load", f"{folder}/model")


if __name__ == "__main__":
    main()
